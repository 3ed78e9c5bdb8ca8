"""How a script, or a notebook's cell, is cut into what runs as it stands and what trains."""
