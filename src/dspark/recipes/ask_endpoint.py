"""Responses from another server: the same questions, the same file, many at once."""

import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from dspark.core.errors import DataError, DSparkError
from dspark.core.records import FinishReason
from dspark.core.sampling import SamplingParams
from dspark.data.dialogues import Question
from dspark.data.endpoint import Endpoint, EndpointConfig, EndpointError, Reply, is_hopeless
from dspark.data.masks import split_answer
from dspark.data.prompts import Prompt
from dspark.data.responses import Response, ResponseFile
from dspark.data.template import encode_messages, thinking_option
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig, answer_text, make_response, unanswered


def ask_endpoint(
    tokenizer: Any,
    prompts: Iterable[Prompt],
    output: ResponseFile,
    config: RegenerateConfig,
    endpoint_config: EndpointConfig,
    progress: Progress,
) -> None:
    """Has a server answer what `output` lacks; may be stopped and run again.

    Replies come in any order; each is written once, as it comes, by this thread alone. What failed
    is not in the file, so the next run asks for it again. The server must serve the target itself:
    its text becomes token ids through the target's template, its end-of-turn token included.

    Raises DSparkError, with counts, when the server is gone for good, and at the end when some
    answers failed.
    """
    stopped = threading.Event()
    endpoint = Endpoint(endpoint_config, stopped)
    progress.say(f"asking {endpoint.model} at {endpoint.url}")
    failures = _Failures(most=2 * endpoint_config.concurrency)
    options = thinking_option(tokenizer, config.thinking)
    open_now = [*unanswered(tokenizer, prompts, output, config)][::-1]
    too_long = 0
    written = 0

    def ask(question: Question) -> Reply:
        return endpoint.complete(
            question.messages,
            temperature=config.temperatures[question.sample],
            max_tokens=config.max_new_tokens,
            seed=question.seed(config.seed),
            template_options=options,
        )

    running: dict[Future[Reply], Question] = {}
    pool = ThreadPoolExecutor(endpoint_config.concurrency)
    try:
        with progress.task("responses", total=sum(q.left for q in open_now)) as advance:
            while open_now or running:
                while open_now and len(running) < endpoint_config.concurrency:
                    question = open_now.pop()
                    ids = encode_messages(tokenizer, question.messages, thinking=config.thinking)
                    if len(ids) > config.max_prompt_tokens:
                        too_long += question.left
                        advance(question.left, "")
                    else:
                        running[pool.submit(ask, question)] = question
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    question = running.pop(future)
                    following = None
                    try:
                        response = _response(tokenizer, question, future.result(), config)
                    except EndpointError as error:
                        failures.add(error.kind, error, written)
                    except DataError as error:
                        failures.add("refused by the template", error, written)
                    else:
                        written += output.append([response])
                        failures.in_a_row = 0
                        following = question.then(answer_text(tokenizer, response))
                    if following is not None:
                        open_now.append(following)
                    left = 0 if following is None else following.left
                    advance(question.left - left, failures.summary)
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
    if too_long:
        progress.say(
            f"{too_long} responses to prompts of more than {config.max_prompt_tokens} tokens are "
            f"left out"
        )
    failures.raise_if_any(written)


def _response(
    tokenizer: Any, question: Question, reply: Reply, config: RegenerateConfig
) -> Response:
    params = SamplingParams(
        temperature=config.temperatures[question.sample],
        max_new_tokens=config.max_new_tokens,
        seed=question.seed(config.seed),
    )
    prompt_ids, response_ids = split_answer(
        tokenizer, question.messages, reply.text, ended=reply.ended, thinking=config.thinking
    )
    reason: FinishReason = "stop" if reply.ended else "length"
    return make_response(question, params, prompt_ids, response_ids, reason)


class _Failures:
    """Counts what went wrong, and gives up when nothing else happens any more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kinds: Counter[str] = Counter()
        self.in_a_row = 0

    @property
    def summary(self) -> str:
        """ "2 too slow, 1 not JSON", or nothing."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())

    def add(self, kind: str, error: DSparkError, written: int) -> None:
        self.kinds[kind] += 1
        self.in_a_row += 1
        hopeless = isinstance(error, EndpointError) and is_hopeless(error)
        if hopeless or self.in_a_row >= self.most:
            raise DSparkError(
                f"{error} ({self.summary}; {written} responses written); "
                f"run the same command again to go on"
            )

    def raise_if_any(self, written: int) -> None:
        if total := self.kinds.total():
            raise DSparkError(
                f"{total} of {written + total} answers failed: {self.summary}; the {written} "
                f"others are written: run the same command again to ask for the rest"
            )
