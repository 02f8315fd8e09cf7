"""Find the wire forms: each file of this folder but wire.py defines one."""

import importlib
import pkgutil

from baar_serve.forms.wire import WireForm

# The wire forms, by the path of their requests.
FORMS: dict[str, WireForm] = {}
for file in pkgutil.iter_modules(__path__):
  if file.name != "wire":
    form = importlib.import_module(f"{__name__}.{file.name}").FORM
    FORMS[form.path] = form
