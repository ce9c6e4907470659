"""The sentences of a report, made from the records of a comparison. Nothing is decided here."""
