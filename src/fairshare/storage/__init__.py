"""The only SQL: one store behind one contract, in a SQLite file or in PostgreSQL."""
