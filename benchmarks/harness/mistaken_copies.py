"""Copies of recipes with a mistake each, and the cause that `recipes prove` has to name."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.edited_copies import (
    BACKWARD,
    CHARACTER_MODEL,
    CLIP,
    DENOISER,
    DROPOUT,
    EVALUATION,
    FINISH,
    FORWARD,
    IMPORT_TIME,
    KEEP,
    LOOP,
    LOSS,
    MLP,
    OBJECTIVE,
    OWN_DATASET,
    PREPARE,
    RECORD,
    SMALL,
    SMALL_WITHOUT_WORKERS,
    STEP,
    SUMS,
    TORCH,
    EditedCopy,
)


@dataclass(frozen=True, kw_only=True)
class Broken(EditedCopy):
    """A copy of a recipe with a mistake, which its name describes."""

    check: str  # the check that must fail
    words: tuple[str, ...]  # phrases that the causes of the check must contain
    passes: str | None = None  # a check that must pass, because the mistake does not concern it


BROKEN: tuple[Broken, ...] = (
    Broken(
        "EMA not kept",
        "examples/averaged",
        ((", average=average)\n", ")\n"),),
        check="resumes",
        words=("average", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        ".item() in the loop",
        MLP,
        ((RECORD, RECORD.replace("loss,", "loss.item(),")),),
        check="waits",
        words=("train.py, line", ".item()", "run.record(loss.item()"),
    ),
    Broken(
        "loss not divided",
        MLP,
        (("accelerator.backward(loss)", "loss.backward()"),),
        check="accumulation",
        words=("gradients of update 1", "not divided by the number of micro-batches"),
    ),
    Broken(
        "evaluation that pads",
        MLP,
        ((EVALUATION, "        for batch, _ in run.equal_batches(loader):\n"),),
        check="samples",
        words=("counted 80 samples", "test has 73", "only fill up a batch"),
    ),
    Broken(
        "metrics averaged over batches",
        MLP,
        (
            (
                SUMS,
                """\
    losses, hits = [], []
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            losses.append(loss)
            hits.append(metrics(logits, batch)["accuracy"].float().mean())
    return {"loss": float(torch.stack(losses).mean()), "accuracy": float(torch.stack(hits).mean())}
""",
            ),
        ),
        check="figures",
        words=("each has computed it from its own samples", "Sums"),
    ),
    # The copies above run by default in CI.
    Broken(
        "second network not kept",
        MLP,
        (
            (LOOP, f"        critic = nn.Linear(10, 1).requires_grad_(False)\n{LOOP}"),
            (
                FORWARD,
                f"{FORWARD}"
                "                loss = loss + 0.1 * critic(logits.float()).square().mean()\n"
                "                drift = logits.detach().float().mean(0, True)\n"
                "                critic.weight.data = critic.weight.lerp(drift, 0.1)\n",
            ),
        ),
        check="resumes",
        words=("critic", "network", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "EMA neither kept nor evaluated",
        MLP,
        (
            (TORCH, f"{TORCH}from torch.optim.swa_utils import AveragedModel\n"),
            (LOOP, f"        average = AveragedModel(model)\n{LOOP}"),
            (RECORD, f"            average.update_parameters(model)\n{RECORD}"),
        ),
        check="resumes",
        words=("average", "network", "no checkpoint", "no compared result depends on this state"),
        passes="repeatable",
    ),
    Broken(
        "Python's random in a worker",
        OWN_DATASET,
        (
            (
                "        self.noise = noise\n",
                "        self.noise = noise\n        self.random = random.Random(0)\n",
            ),
            ("            if random.random() < 0.2:", "            if self.random.random() < 0.2:"),
        ),
        check="resumes",
        words=(".dataset.random (random generator", "each worker has its own copy"),
        flags=("--widths", "8", "--num-workers", "1"),
    ),
    Broken(
        "global counter that changes the loss",
        MLP,
        (
            (OBJECTIVE, f"COUNT = [0]\n{OBJECTIVE}"),
            (
                FORWARD,
                f"                COUNT[0] += 1\n{FORWARD}"
                "                loss = loss * (1 + COUNT[0] / 100)\n",
            ),
        ),
        check="resumes",
        words=("COUNT", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "loss averaged over processes wrongly",
        MLP,
        (
            (
                SUMS,
                """\
    total, hits, count = 0.0, 0.0, 0
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            total += loss.item() * len(logits)
            hits += metrics(logits, batch)["accuracy"].sum().item()
            count += len(logits)
    return {"loss": total / count, "accuracy": hits / count}
""",
            ),
        ),
        check="figures",
        words=("each has computed it from its own samples", "Sums"),
    ),
    Broken(
        "training loss of all processes added up",
        MLP,
        (
            (
                RECORD,
                "            total = accelerator.reduce(loss.detach().clone(), 'sum')\n"
                "            run.record(total, metrics(logits, batch))\n",
            ),
        ),
        check="figures",
        words=("2 times those that were computed", "the number of processes"),
    ),
    Broken(
        "the second process repeats a batch at the end of an epoch",
        MLP,
        (
            (
                OBJECTIVE,
                """\
def last_again(order: Any) -> None:
    micro_batches = order.micro_batches

    def changed(epoch: int, first_update: int = 0) -> torch.Tensor:
        batches = micro_batches(epoch, 0)
        batches[-1] = batches[0]
        return batches[first_update * order.accumulation :]

    object.__setattr__(order, "micro_batches", changed)


OBJECTIVE = """,
            ),
            (
                "        model, description = build_model(config, data)\n",
                "        if accelerator.process_index == 1:\n"
                "            last_again(train_loader.order)\n"
                "        model, description = build_model(config, data)\n",
            ),
        ),
        check="samples",
        words=("epoch 1 used 16 training samples more than once",),
        updates=32,  # an epoch of 8 updates
    ),
    Broken(
        "training metric of the least likely class",
        MLP,
        (("logits.argmax(-1) ==", "logits.argmin(-1) =="),),  # the evaluation does not use it
        check="figures",
        words=("the loop recorded accuracy", "the outputs of this micro-batch give"),
    ),
    Broken(
        "a file opened once and read on",
        MLP,
        (
            (OBJECTIVE, f'LINES = open(__file__, encoding="utf-8")\n{OBJECTIVE}'),
            (
                FORWARD,
                f"{FORWARD}                loss = loss * (1 + len(LINES.readline()) / 100)\n",
            ),
        ),
        check="resumes",
        words=("LINES", "open file"),
    ),
    Broken(
        "schedule stepped for each micro-batch",
        MLP,
        ((PREPARE, "        model, optimizer = accelerator.prepare(model, optimizer)\n"),),
        check="accumulation",
        words=("learning rate of update", "schedule is stepped for each micro-batch"),
    ),
    Broken(
        "dropout seeded by time",
        MLP,
        (
            IMPORT_TIME,
            (FORWARD, f"                torch.manual_seed(time.time_ns() % 2**31)\n{FORWARD}"),
        ),
        check="repeatable",
        words=("random generator torch",),
        flags=DROPOUT,
    ),
    Broken(
        "each micro-batch makes an update",
        MLP,
        (("            with accelerator.accumulate(model):\n", "            if True:\n"),),
        check="accumulation",
        words=("each micro-batch makes an update of its own",),
    ),
    Broken(
        "shuffling by time",
        OWN_DATASET,
        (
            (
                "        self.labels = labels[chosen]\n",
                "        self.labels = labels[chosen]\n"
                "        order = np.random.default_rng().permutation(len(self.labels))\n"
                "        self.images, self.labels = self.images[order], self.labels[order]\n",
            ),
        ),
        check="repeatable",
        words=("differs between two runs of the same command", "contents of a"),
        flags=SMALL_WITHOUT_WORKERS,
    ),
    Broken(
        "learning rate by the clock",
        MLP,
        (
            IMPORT_TIME,
            (
                STEP,
                "                for group in optimizer.param_groups:\n"
                '                    group["lr"] *= 1 + time.time() % 1\n'
                f"{STEP}",
            ),
        ),
        check="repeatable",
        words=("first difference is the learning rate in update 1",),
    ),
    Broken(
        "optimizer made after prepare and not kept",
        MLP,
        (
            (
                KEEP,
                f"{KEEP}"
                "        head = accelerator.unwrap_model(model).head\n"
                "        head_optimizer = torch.optim.SGD(head.parameters(), 1e-2, momentum=0.9)\n",
            ),
            (STEP, f"{STEP}                head_optimizer.step()\n"),
        ),
        check="resumes",
        words=("head_optimizer", "state_dict", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "a list that keeps the logits",
        MLP,
        (
            (LOOP, f"        history: list[torch.Tensor] = []\n{LOOP}"),
            (RECORD, f"{RECORD}            history.append(logits.detach())\n"),
        ),
        check="memory",
        words=("live tensors", "the list `history` of main in train.py"),
        passes="waits",
    ),
    Broken(
        "a loss that keeps its graph",
        MLP,
        (
            (LOOP, f"        total = 0.0\n{LOOP}"),
            (RECORD, f"{RECORD}            total = total + loss\n"),
        ),
        check="memory",
        words=("`total` of main in train.py holds a graph of gradients that grew by",),
        flags=("--dataset", "digits"),
    ),
    Broken(
        "a list that keeps the logits of evaluations",
        MLP,
        (
            (OBJECTIVE, f"KEPT: list[torch.Tensor] = []\n{OBJECTIVE}"),
            (
                '            sums.add(loss, logits, batch["labels"])\n',
                '            sums.add(loss, logits, batch["labels"])\n'
                "            KEPT.append(logits)\n",
            ),
        ),
        check="memory",
        words=("live tensors grows by", "MiB an evaluation", "the list `KEPT` in train.py"),
    ),
    Broken(
        ".item() in a module of another folder",
        MLP,
        (
            (TORCH, f"{TORCH}from parts.values import value_of\n"),
            (RECORD, RECORD.replace("loss,", "value_of(loss),")),
        ),
        check="waits",
        words=("values.py, line 2", ".item()", "called by train.py, line", "value_of(loss)"),
        helpers=(("parts/values.py", "def value_of(loss):\n    return loss.item()\n"),),
    ),
    Broken(
        "generator object not kept",
        MLP,
        (
            (OBJECTIVE, f"NOISE = torch.Generator().manual_seed(0)\n{OBJECTIVE}"),
            (
                FORWARD,
                f"{FORWARD}                loss = loss * (1 + torch.rand((), generator=NOISE))\n",
            ),
        ),
        check="resumes",
        words=("NOISE", "random generator", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "NumPy's generator for augmentation",
        OWN_DATASET,
        (
            (OBJECTIVE, f"AUGMENT = np.random.RandomState(0)\n{OBJECTIVE}"),
            ("np.random.normal(0,", "AUGMENT.normal(0,"),
        ),
        check="resumes",
        words=("AUGMENT", "random generator", "no checkpoint"),
        flags=SMALL_WITHOUT_WORKERS,
    ),
    Broken(
        "last sample of each batch dropped",
        MLP,
        (
            (
                FORWARD,
                "                batch = {name: values[:-1] for name, values in batch.items()}\n"
                f"{FORWARD}",
            ),
        ),
        check="samples",
        words=("15 of the 16 samples of a batch",),
        passes="repeatable",
    ),
    Broken(
        "loss without the last sample",
        MLP,
        (
            (
                'F.cross_entropy(logits, batch["labels"])',
                'F.cross_entropy(logits[:-1], batch["labels"][:-1])',
            ),
        ),
        check="samples",
        words=("does not depend on 1 of the 16 samples",),
    ),
    Broken(
        "a batch skipped in each epoch",
        MLP,
        (
            (
                LOOP,
                "        skipped = set()\n"
                f"{LOOP}"
                "            if run.progress.global_step % 8 == 3 and run.epoch not in skipped:\n"
                "                skipped.add(run.epoch)\n"
                "                continue\n",
            ),
        ),
        check="samples",
        words=("did not record it", "16 samples were skipped"),
    ),
    Broken(
        "evaluation in training mode",
        MLP,
        ((EVALUATION, f"        bare_model.train()\n{EVALUATION}"),),
        check="figures",
        words=("training mode", "Dropout"),
        flags=DROPOUT,
    ),
    Broken(
        "statistics in a plain attribute",
        MLP,
        (
            (
                "        self.head = nn.Linear(in_features, classes)\n",
                "        self.head = nn.Linear(in_features, classes)\n"
                "        self.mean = torch.zeros(())\n",
            ),
            (
                "        features = images.flatten(1)\n",
                "        features = images.flatten(1)\n"
                "        if self.training and torch.is_grad_enabled() and not images.is_meta:\n"
                "            self.mean = self.mean.lerp(features.detach().float().mean(), 0.1)\n"
                "        features = features - self.mean.to(features)\n",
            ),
        ),
        check="resumes",
        words=("model.mean", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "gradients added up over processes, with batch norm",
        DENOISER,
        (
            (
                "                accelerator.backward(loss)\n",
                "                accelerator.backward(loss * accelerator.num_processes)\n",
            ),
        ),
        check="processes",
        words=("gradients of update 1", "gradients of the processes are added up"),
        flags=(),
    ),
    Broken(
        "optimizer state forgotten by a resume on two processes, with batch norm",
        DENOISER,
        (
            (
                LOOP,
                "        if accelerator.num_processes > 1:\n"
                "            optimizer.optimizer.state.clear()\n\n"
                f"{LOOP}",
            ),
        ),
        check="processes",
        words=(
            "a run stopped on one process after update 2 and resumed on two: the part optimizer "
            "had a different state after it was restored than when it was saved",
        ),
        flags=(),
    ),
    Broken(
        "evaluation without the last, smaller batch",
        MLP,
        (
            (
                SUMS,
                """\
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            if len(batch["labels"]) < run.config.batch_size:
                continue
            loss, logits = compute_loss(bare_model, batch)
            sums.add(loss, logits, batch["labels"])
    figures = sums.result()
    return {"loss": figures["loss"], "accuracy": figures["accuracy"]}
""",
            ),
        ),
        check="samples",
        words=("read 73 samples of test, but did not pass 9 of them to the model",),
    ),
    Broken(
        "final evaluation on validation data",
        MLP,
        ((FINISH, FINISH.replace("test_loader", "validation_loader")),),
        check="samples",
        words=("stands for the split test, but read only validation",),
        flags=(*SMALL, "--validation-share", "0.2"),
    ),
    Broken(
        "dropout annealed in place",
        MLP,
        (
            (
                STEP,
                f"{STEP}"
                "                for module in model.modules():\n"
                "                    if isinstance(module, nn.Dropout):\n"
                "                        module.p *= 0.98\n",
            ),
        ),
        check="resumes",
        words=("model.body[2].p", "no checkpoint"),
        flags=DROPOUT,
        passes="repeatable",
    ),
    Broken(
        "layers thawed at exactly one update",
        MLP,
        (
            (
                LOOP,
                "        body = accelerator.unwrap_model(model).body\n"
                "        body.requires_grad_(False)\n"
                f"{LOOP}"
                "            if run.progress.global_step == 4:\n"
                "                body.requires_grad_(True)\n",
            ),
        ),
        check="resumes",
        words=("model.body", "requires_grad of the parameters", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "running mean in a forward hook",
        MLP,
        (
            (
                OBJECTIVE,
                """\
class Centre:
    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if module.training and torch.is_grad_enabled() and not output.is_meta:
            self.mean = self.mean.lerp(output.detach().float().mean(), 0.1)
        return output - self.mean.to(output)


OBJECTIVE = """,
            ),
            (
                "    model.gradient_checkpointing = config.gradient_checkpointing\n",
                "    model.gradient_checkpointing = config.gradient_checkpointing\n"
                "    model.head.register_forward_hook(Centre())\n",
            ),
        ),
        check="resumes",
        words=("model.head._forward_hooks[0].mean", "in a hook", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "a second loader in an endless iterator",
        MLP,
        (
            (TORCH, f"import itertools\n\n{TORCH}"),
            (
                LOOP,
                "        numbers = torch.utils.data.TensorDataset(torch.arange(512))\n"
                "        extra = itertools.cycle(torch.utils.data.DataLoader(numbers, 8))\n"
                f"{LOOP}",
            ),
            (
                FORWARD,
                f"{FORWARD}"
                "                (values,) = next(extra)\n"
                "                loss = loss * (1 + values.float().mean() / 1000)\n",
            ),
        ),
        check="resumes",
        words=("extra (position of an iterator itertools.cycle", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "a copy of the weights kept every eight updates",
        MLP,
        (
            (LOOP, f"        snapshots: list[dict[str, torch.Tensor]] = []\n{LOOP}"),
            (
                RECORD,
                f"{RECORD}"
                "            if run.progress.global_step % 8 == 0:\n"
                "                state = model.state_dict()\n"
                "                snapshots.append({name: state[name].clone() for name in state})\n",
            ),
        ),
        check="memory",
        words=("live tensors grows by", "the list `snapshots` of main in train.py"),
    ),
    Broken(
        "one_hot without the number of classes",
        MLP,
        (
            (
                FORWARD,
                f"{FORWARD}"
                '                targets = F.one_hot(batch["labels"]).float()\n'
                "                loss = loss * targets.sum() / len(logits)\n",
            ),
        ),
        check="waits",
        words=("one_hot without num_classes",),
    ),
    Broken(
        "slow weights in plain attributes of an optimizer",
        MLP,
        (
            (
                OBJECTIVE,
                """\
class Lookahead(torch.optim.AdamW):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.count = 0
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        if self.count % 5 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


OBJECTIVE = """,
            ),
            ("    return torch.optim.AdamW(groups,", "    return Lookahead(groups,"),
        ),
        check="resumes",
        words=(
            "optimizer.optimizer.count (int",
            "optimizer.optimizer.slow (4 items, each a torch.Tensor",
            "no checkpoint",
        ),
        passes="repeatable",
    ),
    Broken(
        "running mean that the loop itself binds first",
        MLP,
        (
            (
                FORWARD,
                f"{FORWARD}"
                "                try:\n"
                "                    running = 0.9 * running + 0.1 * loss.detach().float()\n"
                "                except NameError:\n"
                "                    running = loss.detach().float()\n"
                "                loss = loss / (0.5 + running)\n",
            ),
        ),
        check="resumes",
        words=("running (torch.Tensor, local variable of main())", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "number of the micro-batch from enumerate",
        MLP,
        (
            (LOOP, "        for step, batch in enumerate(run.batches(train_loader)):\n"),
            (
                FORWARD,
                f"{FORWARD}"
                "                ramp = min(1.0, step / 20)\n"
                "                loss = loss + 1e-2 * ramp * logits.float().square().mean()\n",
            ),
        ),
        check="resumes",
        words=("step (int, loop variable of main())", "no checkpoint"),
        passes="repeatable",
    ),
    Broken(
        "a list that keeps NumPy arrays",
        MLP,
        (
            (LOOP, f"        history: list[Any] = []\n{LOOP}"),
            (
                RECORD,
                f"{RECORD}            history.append(logits.float().numpy(force=True).copy())\n",
            ),
        ),
        flags=SMALL,
        check="memory",
        words=("the list `history` of main in train.py grew by",),
    ),
    Broken(
        "perplexity averaged over batches",
        CHARACTER_MODEL,
        (
            (
                'loss=loss * len(batch["text"]))',
                'loss=loss * len(batch["text"]), perplexity=loss.exp() * len(batch["text"]))',
            ),
            (
                '"perplexity": loss.exp()}',
                '"perplexity": totals["perplexity"] / totals["count"]}',
            ),
        ),
        flags=(),
        check="figures",
        words=("perplexity of the", "it is a mean of the figures of batches"),
    ),
    Broken(
        "a schedule that reads the loss in each update",
        MLP,
        (
            (
                "        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)\n",
                "        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n",
            ),
            (PREPARE, "        model, optimizer = accelerator.prepare(model, optimizer)\n"),
            (
                "                scheduler.step()\n",
                "                if accelerator.sync_gradients:\n"
                "                    scheduler.step(loss.detach())\n",
            ),
        ),
        check="waits",
        words=("scheduler.step(loss.detach())",),
        passes="resumes",
    ),
    Broken(
        "loss divided by the sum of class weights",
        MLP,
        (
            (
                LOSS,
                "    weight = torch.arange(1, logits.shape[-1] + 1).to(logits) ** 2 / 10\n"
                '    return F.cross_entropy(logits, batch["labels"], weight=weight), logits\n',
            ),
        ),
        check="accumulation",
        words=("cross_entropy divides the loss by the sum of the weights of its labels",),
    ),
    Broken(
        "loss divided by the number of labels that are not ignored",
        MLP,
        (
            (
                LOSS,
                '    labels = batch["labels"].where(batch["labels"] > 5, -100)\n'
                "    return F.cross_entropy(logits, labels), logits\n",
            ),
        ),
        check="accumulation",
        words=("cross_entropy divides the loss by the number of labels that it does not ignore",),
    ),
    Broken(
        "loss divided by the sum of weights of its own",
        MLP,
        (
            (
                LOSS,
                '    losses = F.cross_entropy(logits, batch["labels"], reduction="none")\n'
                '    weights = 1.0 + batch["labels"].float()\n'
                "    return (losses * weights).sum() / weights.sum(), logits\n",
            ),
        ),
        check="accumulation",
        words=("times as much as in one batch", "such as a sum of weights or a number of tokens"),
    ),
    Broken(
        "gradients clipped in each micro-batch",
        MLP,
        (
            (
                CLIP,
                "                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            ),
        ),
        check="accumulation",
        words=("clips the gradients", "before the accumulation ends", "clip_grad_norm_(model.par"),
    ),
    Broken(
        "loss divided twice by the number of micro-batches",
        MLP,
        ((BACKWARD, BACKWARD.replace("loss", "loss / config.gradient_accumulation_steps")),),
        check="processes",
        words=("on one process already", "divided twice by the number of micro-batches"),
    ),
    Broken(
        "classes numbered in the order of a set",
        OWN_DATASET,
        (
            (
                "        self.labels = labels[chosen]\n",
                "        names = set(map(str, labels))\n"
                "        numbers = {name: number for number, name in enumerate(names)}\n"
                "        chosen_names = map(str, labels[chosen])\n"
                "        self.labels = np.array([numbers[name] for name in chosen_names])\n",
            ),
        ),
        check="processes",
        words=("the contents of a training batch", "although its samples are the same"),
        flags=SMALL_WITHOUT_WORKERS,
    ),
)
