"""All errors of the library, and `PERMANENT`, the group that waiting cannot fix.

```python
from breadbox.errors import BackpressureError, ReplayBufferError
```
"""

from breadbox.model.errors import *  # noqa: F403 - this is their public place
