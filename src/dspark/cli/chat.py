"""`dspark chat`: a conversation in the terminal."""

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.output import Screen, print_error, print_note
from dspark.cli.sampling import sampling_params
from dspark.cli.table import number
from dspark.core.errors import UserError
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.recipes.llm import LLM, RequestOutput

with contextlib.suppress(ImportError):  # not on Windows: lines are read without editing there
    import readline  # noqa: F401  (its import alone gives `input` arrow keys and past lines)

HELP = """\
/stats   how speculation has done so far
/new     forget the conversation and start another
/help    this
/exit    leave (or Ctrl-D)
Ctrl-C stops an answer and keeps what came."""


@dataclass(slots=True)
class Session:
    """A conversation, and what its answers came to."""

    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    fates: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, output: "RequestOutput", seconds: float) -> None:
        self.messages.append({"role": "assistant", "content": output.text})
        self.answers += 1
        self.tokens += len(output.token_ids)
        self.rounds += output.rounds
        self.seconds += seconds
        for fate in output.fates:
            self.fates[fate] = self.fates.get(fate, 0) + 1

    def stats(self) -> str:
        if not self.answers:
            return "nothing was answered yet"
        length = (self.tokens - self.answers) / self.rounds if self.rounds else None
        shares = ", ".join(f"{count} {fate}" for fate, count in sorted(self.fates.items()))
        return (
            f"{self.answers} answers, {self.tokens} tokens in {self.seconds:.1f} s "
            f"({self.tokens / self.seconds:.1f} tokens/s)\n"
            f"accepted length {number(length)} tokens a round; {shares}"
        )


def chat(
    system: Annotated[
        str | None, typer.Option(help="What the model should be.", show_default=False)
    ] = None,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    policy: options.Policy = None,
    verification: options.Verification = None,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 512,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    debug: options.Debug = False,
) -> None:
    """Talk with the model; tokens are coloured by how they came about."""
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress

    params = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        verification=verification,
        seed=seed,
    )
    llm = LLM(
        target,
        draft=draft,
        draft_length=draft_length,
        policy=policy,
        weights=weights,
        device=device,
        cuda_graphs=cuda_graphs,
        threads=threads,
        progress=Progress(),
    )
    screen = Screen()
    print_note("Ask something; /help lists the commands.")
    if llm.policy.drafts:
        screen.legend()
    talk(llm, params, Session(system), screen)


def talk(llm: "LLM", params: SamplingParams, session: Session, screen: Screen) -> None:
    """Reads and answers until the input ends or /exit."""
    while True:
        try:
            line = input("> " if screen.interactive else "").strip()
        except EOFError:
            screen.end_line()
            return
        except KeyboardInterrupt:  # at the prompt: drops the line, as in a shell
            print_note("\n(/exit or Ctrl-D leaves)")
            continue
        if line == "/exit":
            return
        if line == "/new":
            session.restart()
            print_note("A new conversation.")
        elif line == "/stats":
            print_note(session.stats())
        elif line == "/help":
            print_note(HELP)
        elif line.startswith("/"):
            print_error(f"there is no command {line.split()[0]}; /help lists them")
        elif line:
            answer(llm, params, session, screen, line)


def answer(
    llm: "LLM", params: SamplingParams, session: Session, screen: Screen, question: str
) -> None:
    """One turn. Ctrl-C ends the answer; what came of it is part of the conversation."""
    session.messages.append({"role": "user", "content": question})
    try:
        generation = llm.start([llm.encode_messages(session.messages)], params)
    except UserError as error:
        session.messages.pop()
        print_error(f"{error} (/new starts another conversation)")
        return
    started = time.perf_counter()
    try:
        for piece in generation:
            for text, fate in zip(piece.texts, piece.fates, strict=True):
                screen.token(text, fate)
    except KeyboardInterrupt:
        screen.print(" [stopped]", end="")
    screen.end_line()
    [output] = generation.outputs()
    session.add(output, time.perf_counter() - started)
    screen.print()
