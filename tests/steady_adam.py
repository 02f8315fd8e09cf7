"""Configure the sandbox, and AdamW so that it does not amplify rounding errors.

With its usual eps, AdamW turns a gradient that consists of rounding errors into a step
of the whole learning rate.
"""

import functools

import optax

from examples.sandbox import get_config  # noqa: F401

optax.adamw = functools.partial(optax.adamw, eps=0.01)
