"""The scripts need libraries that the tests do not need."""

collect_ignore_glob = ["make*.py"]
