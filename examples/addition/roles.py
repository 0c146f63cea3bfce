"""Generator, verifier and learner: each a process, on any machine that reaches the server."""

import random
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import torch
from model import NEW, PROMPT_LENGTH, Transformer, prompt, reward_of, warm_up, without_padding

import breadbox
from breadbox.errors import GroupEndedError, SessionEndedError
from breadbox.types import PackedBatch

BUFFER, MEMBERS, GROUPS = "sums", 8, 16
CONFIG = breadbox.BufferConfig.preset(
    "groups",
    fragments_per_chunk=MEMBERS,  # Answers to one question.
    groups_per_version=GROUPS,  # Questions of one update.
    lead_versions=1,  # Generators begin groups for this update and for the next.
    required_parts=("tokens", "reward"),  # An answer counts once the verifier has judged it.
    drop_equal="reward",  # Nothing is learned from a group that is all right, or all wrong.
    lease_s=20.0,  # What a killed learner had fetched comes back that soon.
)
LEARNING_RATE, CLIP, EVALUATE_EVERY = 1e-3, 0.2, 5
torch.set_num_threads(1)


def connect(address: str) -> breadbox.Client:
    # A server that was killed is back within that time.
    client = breadbox.connect(address, buffer=BUFFER, reconnect_s=300)
    client.create_buffer(BUFFER, CONFIG)  # Unless it is there.
    return client


def generate(address: str) -> None:
    """Take tickets, answer a question for each with the newest weights, and append the answers."""
    model, known = Transformer(), None
    with connect(address) as client:
        while True:
            newer = client.load_model(known, max_wait_s=600 if known is None else 0)
            if newer is not None:
                known, weights = newer
                model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
            if known is None:
                continue  # No learner has come yet.
            tickets = client.tickets(GROUPS // 4, max_wait_s=None, lease_s=20)
            with ExitStack() as held:  # Tickets of a generator that is killed expire.
                groups = [held.enter_context(ticket).group for ticket in tickets]
                sequences = answers(model, groups, known.model_version, tickets[0].session_id)
                late = [each for each in tickets if each.late]
                for ticket in late:  # The learner is too far ahead of these groups.
                    ticket.give_back()
                over = {ticket.group for ticket in late}
                client.append_many([each for each in sequences if each.group not in over])


def answers(
    model: Transformer, groups: list[str], version: int, session_id: str
) -> list[breadbox.Sequence]:
    """Draw the answers of each group; its question follows from its name."""
    prompts = [prompt(*random.Random(name).choice(NEW)) for name in groups]
    rows = model.complete([each for each in prompts for _ in range(MEMBERS)])
    sequences = []
    for number, (ids, log_prob) in enumerate(zip(*rows, strict=True)):
        known = without_padding(ids)
        sequences.append(
            breadbox.Sequence(
                group=groups[number // MEMBERS],
                member=number % MEMBERS,
                tokens={
                    "ids": ids[: len(known)].numpy(),
                    "log_prob": log_prob[: len(known)].numpy(),
                },
                model_version_min=version,
                model_version_max=version,
                session_id=session_id,
            )
        )
    return sequences


def verify(address: str) -> None:
    """Claim answers that nothing has judged, and attach their rewards."""
    with connect(address) as client:
        while True:
            # What a killed verifier had claimed can be claimed again after 5 s.
            claimed = client.claim(lacking="reward", count=128, max_wait_s=None, lease_s=5)
            ended = GroupEndedError, SessionEndedError  # Meanwhile: the answer is of no use now.
            with claimed as claim, suppress(*ended):
                client.attach([judged(sequence) for sequence in claim.sequences()])


def judged(sequence: breadbox.Sequence) -> breadbox.Part:
    reward = reward_of(sequence.tokens["ids"].tolist())
    return breadbox.Part(
        sequence.group,
        sequence.member,
        "reward",
        numbers={"reward": reward},
        session_id=sequence.session_id,
    )


class Run:
    """What a learner goes on from, in one file: a crash leaves the old one or the new one."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.path = folder / "learner.pt"
        self.model = Transformer()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.session_id, self.version = f"run-{uuid4().hex[:8]}", 1
        self.trained: list[str] = []
        """Names of all groups that were trained on."""
        self.accuracies: list[tuple[int, float]] = []
        """Version, and its accuracy on held-out sums."""
        if self.path.exists():
            self.load()
            print(f"version {self.version}: goes on with {self.path}", flush=True)
        else:
            print("warm-up: the learner is shown the answers of some sums", flush=True)
            warm_up(self.model, seed)
            self.evaluate()
            self.save()

    def load(self) -> None:
        saved = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for name in ("session_id", "version", "trained", "accuracies"):
            setattr(self, name, saved[name])

    def evaluate(self) -> None:
        self.accuracies.append((self.version, self.model.accuracy()))
        print(f"version {self.version}: accuracy {self.accuracies[-1][1]:.1%}", flush=True)

    def save(self) -> None:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        for name in ("session_id", "version", "trained", "accuracies"):
            parts[name] = getattr(self, name)
        torch.save(parts, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def update(self, batch: PackedBatch) -> None:
        """Take a step of GRPO on those groups that no step was taken on."""
        known = set(self.trained)
        is_new = torch.tensor([name not in known for name in batch.groups])
        if not is_new.any():
            return
        reward, group = batch.numbers["reward"], batch.group.long()
        mean = (group.bincount(reward) / group.bincount())[group]
        deviation = (group.bincount((reward - mean) ** 2) / group.bincount()).sqrt()[group]
        advantage = ((reward - mean) / (deviation + 1e-4)).float()
        advantage = advantage.repeat_interleave(batch.lengths)[1:]

        # What the last token of a sequence predicts is not the first of the next.
        ids, position = batch.tokens["ids"].long(), batch.position_ids
        counts = is_new[group].repeat_interleave(batch.lengths)[1:]
        counts &= position[1:] >= PROMPT_LENGTH
        log_prob = self.model(ids, position)[:-1].gather(-1, ids[1:, None])[:, 0]
        ratio = (log_prob - batch.tokens["log_prob"][1:]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        self.optimizer.zero_grad()
        (-gain[counts].mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.trained += [name for name in batch.groups if name not in known]


def start_session(client: breadbox.Client, run: Run) -> None:
    """Go on in the run's session, or in a new one if another run has taken the buffer since."""
    try:
        client.start_session(run.session_id, model_version=run.version)
    except SessionEndedError:
        run.session_id = f"run-{uuid4().hex[:8]}"
        run.save()
        client.start_session(run.session_id, model_version=run.version)
    client.publish(run.session_id, run.version, run.model.state_dict())


def learn(address: str, folder: Path, seed: int, versions: int, target: float) -> None:
    """Train the run of a folder until it has a number of versions, or an accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, seed)
    with connect(address) as client:
        start_session(client, run)
        while run.version < versions and run.accuracies[-1][1] < target:
            with client.fetch(GROUPS * MEMBERS, max_wait_s=None) as lease:
                for batch in lease.packed(device="cpu"):
                    run.update(batch)
                run.version += 1
                if run.version % EVALUATE_EVERY == 0 or run.version == versions:
                    run.evaluate()
                # Within the lease. If this process is killed before the lease ends, its groups come
                # again, and `update` leaves them out. In the other order they would be lost.
                run.save()
            client.publish(run.session_id, run.version, run.model.state_dict())
        client.end_session(run.session_id)
