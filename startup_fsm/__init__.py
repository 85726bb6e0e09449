"""Event-sourced state machine for the start of LLM engines. Exports are lazy: reading a journal needs no torch."""
