"""The reference engine: a decoder of the Llama family in plain torch, small enough to read in one sitting.

Importing this package imports no torch; its modules `model`, `checkpoint`, `sampler`, `paging` and `generate` do.
"""
