"""Functions of a policy's pass with backward passes of their own: the same numbers in fewer trips to memory."""
