"""The notebook side of a cluster: its processes, its process group, what runs on it."""
