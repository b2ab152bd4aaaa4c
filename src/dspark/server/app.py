"""The application: routes, what every request passes, and the page at `/`."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse

from dspark.server import chat, completions, operations
from dspark.server.description import describe_server
from dspark.server.errors import ApiError, answer_api_error, answer_http, answer_invalid
from dspark.server.guard import GUARDED, Guard
from dspark.server.serving import Serving
from dspark.server.wrapping import Wrapping

PAGE = Path(__file__).parent / "page"


def build_app(serving: Serving) -> FastAPI:
    """`/openapi.json` describes the API; FastAPI's own pages would load scripts from elsewhere."""
    app = FastAPI(
        title="dspark",
        version=serving.about["version"],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.serving = serving
    for router in (chat.router, completions.router, operations.router):
        app.include_router(router)
    for file in PAGE.iterdir():
        _add_file(app, "/" if file.name == "index.html" else f"/{file.name}", file)
    describe_server(app, serving, GUARDED)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    # The last one added is the outermost.
    app.add_middleware(Guard, serving=serving)
    app.add_middleware(
        Wrapping,
        max_body_bytes=serving.config.max_body_kib * 1024,
        receive_timeout=serving.config.receive_timeout,
        metrics=serving.metrics,
    )
    return app


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    """A route a file: no path that a client sends ever becomes a file's name."""

    async def answer(_request: Request) -> FileResponse:
        return FileResponse(file)

    app.add_route(path, answer, methods=["GET"])
