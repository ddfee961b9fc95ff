"""The scripts need libraries that the tests do not need."""

collect_ignore = ["make.py", "make_gguf.py"]
