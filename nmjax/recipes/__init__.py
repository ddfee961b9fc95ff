"""Published methods, their text, and the table of rules that gives each layer its own."""
