"""The routes of the server, and how it starts and stops.

    GET  /                      a chat that colours accepted, recovered and bonus tokens
    GET  /health                200: ready; 503: it stops
    GET  /metrics               counters in the text format of Prometheus
    GET  /v1/models             the served model, with the methods that a request may name; one
                                whose head, draft model or knob is missing here says so: 400
    POST /v1/completions        continue a prompt, or several
    POST /v1/chat/completions   answer messages, by the model's chat template

With a key, all under /v1 need it: `Authorization: Bearer KEY`.

    400  wrong JSON, a wrong or unknown field, an unknown method, a method that would measure models
         while all wait, a prompt as long as the context
    401  a wrong key                     413  a body of more than 1 MiB
    404  an unknown model or path        429  as many texts wait as may
    405  another method of HTTP          503  the server stops
    500  a defect: the log says more, the reply says nothing

In a stream, an error after the first event is an event of its own, and the last one.
"""

import asyncio
import hmac
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from importlib.resources import files
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation
from tinyspec.lm.scheduler import RequestCancelled
from tinyspec.serve.api import (
    BODY_LIMIT,
    ApiError,
    Piece,
    ReplyWriter,
    explain,
    internal_error,
    read_body,
    read_request,
    unavailable,
)
from tinyspec.serve.engine import DRAIN_SECONDS, RunningTexts, ServingEngine

T = TypeVar("T")

DISCARD_LIMIT = 16 * BODY_LIMIT  # bytes of a body too large that are read, so that the client reads
BACKLOG = 2048  # connections that wait to be accepted, as uvicorn has it
CLOSE_SECONDS = 5  # for the last replies to reach their clients
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
log = logging.getLogger("tinyspec.serve")


def make_app(engine: ServingEngine, key: str | None = None) -> Starlette:
    """Return the server as an ASGI application.

    key  what clients must send; None: nothing
    """
    routes = Routes(engine, key)
    handlers: Mapping[Any, Any] = {
        ApiError: routes.answer_error,
        HTTPException: routes.answer_http_error,
        ClientDisconnect: routes.answer_nobody,
        Exception: routes.answer_defect,
    }
    app = Starlette(
        routes=[
            Route("/", routes.show_page, methods=["GET"]),
            Route("/health", routes.show_health, methods=["GET"]),
            Route("/metrics", routes.show_metrics, methods=["GET"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.show_model, methods=["GET"]),
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route("/v1/chat/completions", routes.complete_chat, methods=["POST"]),
        ],
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False  # an address with a slash too many is another one: 404
    return app


class EventStream(StreamingResponse):
    """Server-sent events of running texts. However the response ends, the texts end."""

    def __init__(self, events: AsyncIterator[str], running: RunningTexts):
        super().__init__(events, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.running.cancel()


class Routes:
    """What the server answers."""

    def __init__(self, engine: ServingEngine, key: str | None):
        self.engine, self.key = engine, key

    # ------------------------------------------------------------------ errors

    async def answer_error(self, request: Request, error: ApiError) -> Response:
        """Answer with an error of the API."""
        self.engine.metrics.add(f'status="{error.status}"', rejected_total=1)
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def answer_http_error(self, request: Request, error: HTTPException) -> Response:
        """Answer an unknown path, and a method of HTTP that a path does not have."""
        if error.status_code == 404:
            message = f"there is no {request.url.path[:100]} here: see GET / and /v1/models"
        else:
            message = f"{request.method} is not what {request.url.path[:100]} answers"
        found = ApiError(message, status=error.status_code, headers=error.headers)
        return await self.answer_error(request, found)

    async def answer_nobody(self, request: Request, error: ClientDisconnect) -> Response:
        """End a request whose client has gone; nobody reads the answer."""
        return Response(status_code=499)

    async def answer_defect(self, request: Request, error: Exception) -> Response:
        """Answer what nobody foresaw. The log has the traceback, the client sees nothing of it."""
        return await self.answer_error(request, internal_error())

    # ------------------------------------------------------------------ pages

    async def show_page(self, request: Request) -> Response:
        """Answer GET /."""
        page = (files("tinyspec") / "serve" / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def show_health(self, request: Request) -> Response:
        """Answer GET /health."""
        if self.engine.is_draining:
            raise unavailable("the server stops")
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        return PlainTextResponse(
            self.engine.write_metrics(), media_type="text/plain; version=0.0.4"
        )

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def show_model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME."""
        self._check_key(request)
        if request.path_params["name"] != self.engine.name:
            message = f"there is no such model here: this server has '{self.engine.name}'"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "id": engine.name,
            "object": "model",
            "created": engine.started,
            "owned_by": "tinyspec",
            "tinyspec": {
                "context": engine.model.config.max_positions,
                "has_chat": engine.model.tokenizer.has_chat,
                "method": engine.method,
                "methods": engine.list_methods(),
                "drafts": [draft.name for draft in engine.drafts or ()],
            },
        }

    # ------------------------------------------------------------------ texts

    async def complete(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        return await self._answer(request, is_chat=False)

    async def complete_chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._answer(request, is_chat=True)

    def _check_key(self, request: Request) -> None:
        """Raise ApiError 401 unless the request has the key."""
        if self.key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        theirs = given.strip().encode("latin-1")  # as which the bytes of a header are read
        ours = self.key.strip().encode("utf-8", "surrogateescape")
        right = hmac.compare_digest(theirs, ours)
        if scheme.lower() != "bearer" or not right:
            raise ApiError(
                "the key is missing or wrong: send `Authorization: Bearer KEY`",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        self._check_key(request)
        if self.engine.is_draining:
            raise unavailable("the server stops: it takes no more requests")
        asked = read_request(read_body(await receive_body(request)), is_chat, self.engine.name)
        prompts, options = await asyncio.to_thread(self.engine.prepare, asked)
        running = self.engine.submit(prompts, options, in_pieces=asked.stream)
        writer = self.engine.make_writer(asked, prompts, options)
        try:
            if not asked.stream:
                results = await run_for_client(request, collect_results(running))
                return JSONResponse(writer.write_reply(results))
            items = running.read()
            await run_for_client(request, anext(items))  # an error has its own status
        except BaseException as error:
            running.cancel()
            if isinstance(error, Exception):
                raise self._explain(error) from error
            raise
        return EventStream(self._write_events(items, writer), running)

    def _explain(self, error: Exception) -> Exception:
        """Return what a client is told of an error in a text."""
        if isinstance(error, RequestCancelled):
            return unavailable("the server stops: the text was cut")
        if isinstance(error, TinyspecError):
            return explain(error)
        if isinstance(error, (ApiError, ClientDisconnect)):
            return error
        log.error("a request failed", exc_info=error)
        return internal_error()

    async def _write_events(
        self, items: AsyncIterator[tuple[int, Any]], writer: ReplyWriter
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        results = dict[int, Generation]()
        try:
            for event in writer.write_opening():
                yield write_event(event)
            async for index, item in items:
                if isinstance(item, Piece):
                    if item.tokens or item.text:
                        yield write_event(writer.write_piece(index, item))
                elif isinstance(item, Generation):
                    results[index] = item
                    yield write_event(writer.write_end(index, item))
            for event in writer.write_usage(list(results.values())):
                yield write_event(event)
            yield "data: [DONE]\n\n"
        except Exception as error:
            told = self._explain(error)
            if isinstance(told, ApiError):
                self.engine.metrics.add(f'status="{told.status}"', rejected_total=1)
                yield write_event(told.body)


def write_event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event.

    >>> write_event({"a": "b"})
    'data: {"a": "b"}\\n\\n'
    """
    return f"data: {json.dumps(data)}\n\n"


async def receive_body(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError 413 if it is too large."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= BODY_LIMIT:
            body += part
        elif size > DISCARD_LIMIT:
            break
    if size > BODY_LIMIT:
        message = f"the body has more than {BODY_LIMIT} bytes: shorten the prompt"
        raise ApiError(message, status=413, code="body_too_large")
    return bytes(body)


async def collect_results(running: RunningTexts) -> list[Generation]:
    """Return the results of all texts of a request, in the order of the prompts."""
    results = dict[int, Generation]()
    async for index, item in running.read():
        if isinstance(item, Generation):
            results[index] = item
    return [results[index] for index in range(len(results))]


async def run_for_client(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` returns. Raises ClientDisconnect as soon as the client has gone."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()


# ---------------------------------------------------------------------- start and stop


class GracefulServer(uvicorn.Server):
    """uvicorn, but a first signal lets running requests finish, while new ones are answered 503."""

    def __init__(
        self, config: uvicorn.Config, engine: ServingEngine, seconds: float = DRAIN_SECONDS
    ):
        super().__init__(config)
        self.engine, self.seconds = engine, seconds
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for running requests, before it stops."""
        return self._draining is not None and not self._draining.done()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal cuts what still runs."""
        self.begin_stop(0.0 if self.engine.is_draining else self.seconds)

    def begin_stop(self, seconds: float) -> None:
        """Take no more requests, and stop when those that run have ended, or after some seconds."""
        self.engine.is_draining = True
        self.seconds = seconds

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether the server is to stop."""
        if self.engine.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self.engine.drain(self.seconds))
        if self._draining is not None and (self._draining.done() or self.seconds <= 0):
            await asyncio.to_thread(self.engine.close)
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; one that is still open after some seconds is cut.

        Without that, uvicorn cancels its task, which writes a traceback.
        """
        late = asyncio.get_running_loop().call_later(CLOSE_SECONDS - 1, self._cut_connections)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises TinyspecError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once only where the protocol is named; else each reply waits
    # 40 ms for the client's acknowledgement of its headers.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # a port is free again as soon as its server has ended
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise TinyspecError(
            f"cannot listen on {host}, port {port} ({reason}): give another --port or --host"
        ) from error
    return listening


def make_server(engine: ServingEngine, key: str | None = None) -> GracefulServer:
    """Return a server that is not started yet: `serve` or `run` starts it."""
    config = uvicorn.Config(
        make_app(engine, key),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return GracefulServer(config, engine)
