"""The script needs libraries that the tests do not need."""

collect_ignore = ["make.py"]
