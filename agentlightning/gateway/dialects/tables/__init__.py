"""What each wire format makes of the fields of a request: tables for readers, the code and the documentation."""
