"""List the wire forms, each of which has a file."""

from baar_serve.forms import chat_completions, messages, responses
from baar_serve.forms.wire import WireForm

# The wire forms, by the path of their requests.
FORMS: dict[str, WireForm] = {}
for file in (chat_completions, messages, responses):
  FORMS[file.FORM.path] = file.FORM
