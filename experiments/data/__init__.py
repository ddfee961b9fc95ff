"""Data sets: found on disk or embedded, small ones held on the device, large ones streamed."""
