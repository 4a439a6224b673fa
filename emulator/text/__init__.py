"""The PTX front end: text -> records. See `parser.parse`."""
