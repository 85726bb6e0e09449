"""A small engine that decodes over a paged KV cache, in plain torch. It never heard of anything else here."""
