"""The worker side: what runs inside the engine processes."""
