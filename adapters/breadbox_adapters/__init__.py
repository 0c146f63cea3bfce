"""Other projects' interfaces on top of Breadbox."""
