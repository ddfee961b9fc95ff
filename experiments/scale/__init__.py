"""Many devices and many processes: meshes, agreement between processes, signals, services that receive numbers."""
