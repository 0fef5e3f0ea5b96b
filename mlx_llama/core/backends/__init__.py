"""The module interface of the backends, and how one is selected."""
