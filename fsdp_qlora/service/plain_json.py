"""JSON of ASCII, as answers of the service."""

import json

from fastapi.responses import JSONResponse


class PlainJSON(JSONResponse):
    """JSON of ASCII: a client's texts may have halves of surrogates, which UTF-8 has not."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode()
