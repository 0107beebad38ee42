"""The models that a project starts with: what they see, what they begin with, what they are fed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from tests.conftest import Project, project_fixture

VOCABULARY = 256


text = project_fixture("model_of_text", parallelism="single", checkpoint="dcp")


tokens = project_fixture(
    "model_of_tokens", parallelism="single", checkpoint="dcp", text="tokenizer"
)


image = project_fixture(
    "model_of_images", task="image_classifier", parallelism="single", checkpoint="torch_save"
)


def model_of(project: Project, **changes: Any) -> torch.nn.Module:
    if "Images" in vars(project.module("data")):
        changes["data__path"] = None
    config = project.config(**changes)
    torch.manual_seed(0)
    spec = project.module("data").build_datasets(config)[2]
    return project.module("model").build_model(config, spec)


def test_a_later_token_changes_no_earlier_logit(text: Project) -> None:
    model = model_of(text)
    tokens = torch.randint(0, VOCABULARY, (1, 32))
    with torch.no_grad():
        before = model(tokens)
        for place in (0, 1, 17, 31):
            other = tokens.clone()
            other[0, place] += 1 if other[0, place] == 0 else -1
            after = model(other)
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.equal(after[:, place], before[:, place])  # it does see its own


def test_an_earlier_token_matters_by_its_distance(text: Project) -> None:
    """Without positions, attention would see a set of tokens."""
    model = model_of(text)
    tokens = torch.arange(32)[None]
    other = tokens.clone()
    other[0, :2] = torch.tensor([1, 0])
    with torch.no_grad():
        assert (model(tokens) - model(other))[0, -1].abs().max() > 1e-6


def test_who_knows_the_next_token_has_no_loss(text: Project) -> None:
    """And who knows another than the next one has all of it."""
    compute_loss = text.module("model").compute_loss
    rows = (torch.arange(33) * 7 + torch.tensor([[3], [100]])) % VOCABULARY
    for kind, unit in ((torch.uint8, "byte"), (torch.int32, "token")):
        for ahead, least, most in ((1, 0, 1e-3), (0, 49, 51), (2, 49, 51), (-1, 49, 51)):

            def knows(tokens: torch.Tensor, targets: torch.Tensor, ahead: int = ahead) -> Any:
                logits = 50.0 * F.one_hot((tokens + 7 * ahead) % VOCABULARY, VOCABULARY)
                return F.cross_entropy(logits.mT, targets, reduction="sum")

            total, count, metrics = compute_loss(knows, {"tokens": rows.to(kind)})
            assert count == rows[:, 1:].numel()
            assert least <= float(total) / count <= most
            bits = metrics[f"bits_per_{unit}"]
            assert float(bits) == pytest.approx(float(total) / math.log(2))


@pytest.mark.parametrize("changes", [{}, {"model__layers": 6, "model__width": 64}])
def test_an_untrained_model_knows_nothing(text: Project, image: Project, changes: Any) -> None:
    """Its loss is the logarithm of what there is to choose from, within a tenth."""
    for project, classes in ((text, VOCABULARY), (image, 10)):
        model = model_of(project, **changes)
        sample = {"tokens": torch.randint(0, classes, (8, 33))}
        if project is image:
            sample = {"images": torch.rand(8, 1, 8, 8), "labels": torch.arange(8)}
        loss = project.module("model").compute_loss(model, sample)
        assert float(loss.total.detach()) / loss.count == pytest.approx(math.log(classes), rel=0.1)


@pytest.mark.parametrize("layers", [2, 8])
def test_what_is_added_to_the_residual_stream_begins_small(text: Project, layers: int) -> None:
    """By the root of how many are added, so that a deep model begins like a flat one."""
    for name, weight in model_of(text, model__layers=layers).named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            adds = name.endswith((".out.weight", ".down.weight"))
            deviation = 0.02 / math.sqrt(2 * layers) if adds else 0.02
            assert float(weight.detach().std()) == pytest.approx(deviation, rel=0.1), name
            assert abs(float(weight.detach().mean())) < deviation / 10, name


def test_the_digits_are_those_of_their_labels(image: Project) -> None:
    """Each fifth of them is for validation; black is 0 and white is 1."""
    digits = load_digits()
    config = image.config(data__path=None, data__max_shift=0)
    training, validation, spec = image.module("data").build_datasets(config)
    assert spec.classes == tuple("0123456789") and spec.channels == 1
    chosen = np.arange(len(digits.target)) % 5 == 0
    for part, wanted in ((training, ~chosen), (validation, chosen)):
        batch = part.__getitems__(list(range(len(part))))
        assert batch["images"].dtype == torch.float32 and batch["labels"].dtype == torch.int64
        assert np.array_equal(batch["images"][:, 0].numpy() * 16, digits.images[wanted])
        assert np.array_equal(batch["labels"].numpy(), digits.target[wanted])
        assert batch["images"].min() == 0 and batch["images"].max() == 1


def test_training_images_are_shifted_as_their_keys_say(image: Project) -> None:
    """Nothing comes in but black, no label changes, and validation sees what there is."""
    config = image.config(data__path=None, data__max_shift=2)
    training, validation, _ = image.module("data").build_datasets(config)
    ids, keys = list(range(25)), np.arange(25, dtype=np.uint64)
    for part, most in ((training, 2), (validation, 0)):
        batch = part.__getitems__(ids)
        shifted = part.augment(batch, keys)
        assert torch.equal(shifted["labels"], batch["labels"])
        padded, seen = F.pad(batch["images"], [most] * 4), set()
        for old, new in zip(padded, shifted["images"], strict=True):
            places = [
                (down, across)
                for down in range(2 * most + 1)
                for across in range(2 * most + 1)
                if torch.equal(old[:, down : down + 8, across : across + 8], new)
            ]
            assert places
            seen |= set(places)
        assert len(seen) >= (2 * most + 1) ** 2, "some shifts do not occur"


def test_who_knows_the_label_has_no_loss(image: Project) -> None:
    compute_loss = image.module("model").compute_loss
    batch = {"images": torch.rand(6, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 3, 4, 9])}
    for shift, loss, right in ((0, 0.0, 6), (1, 50.0, 0)):
        logits = 50.0 * F.one_hot((batch["labels"] + shift) % 10, 10)
        total, count, metrics = compute_loss(lambda _, logits=logits: logits, batch)
        assert (count, int(metrics["accuracy"])) == (6, right)
        assert float(total) / count == pytest.approx(loss, abs=1e-3)


def test_the_order_of_samples_is_that_of_earlier_releases(text: Project) -> None:
    """Else a run that is gone on with by a later one would see some samples twice."""
    sampling = text.module("sampling")
    for size, wanted in (
        (7, [3, 6, 4, 0, 6, 3, 2, 5]),
        (1000, [713, 291, 135, 246, 282, 40, 8, 250]),
        (4097, [323, 3, 3224, 222, 776, 2571, 995, 2947]),
        (10**6, [489772, 522608, 366574, 755729, 42953, 345582, 337943, 230182]),
    ):
        assert sampling.GlobalBatches(size, 8, seed=3).ids(5).tolist() == wanted
    in_mixtures = sampling.GlobalBatches(1000, 8, 3, sampling.MIXTURE, 1)
    assert in_mixtures.ids(5).tolist() == [421, 523, 524, 844, 549, 220, 563, 967]
    keys = [1096304176537845087, 682370450899765808, 2744041717036896072]
    assert sampling.sample_keys(3, np.arange(3)).tolist() == keys
    assert sampling.fixed_subset(10**6, 4).tolist() == [140063, 919950, 502981, 645244]


def test_own_backwards_have_the_bits_of_autograd(text: Project) -> None:
    """Those of the rotary positions and of the squared ReLU; their second derivatives are right."""
    module = text.module("model")
    cosines, sines = module.rotary(5, 8)[:, :, None]

    def squared(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) * F.relu(x)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return module.turn(x, cosines.to(x.dtype), sines.to(x.dtype))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return module.Rotation.apply(x, cosines.to(x.dtype), sines.to(x.dtype))

    for own, plain in ((rotated, turned), (module.SquaredReLU.apply, squared)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
            factors = torch.randn(2, 5, 3, 8).to(dtype)
            assert torch.equal(own(x), plain(x))
            gradients = [torch.autograd.grad((y(x) * factors).sum(), x)[0] for y in (own, plain)]
            assert torch.equal(*gradients)
        x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(own, (x,)) and torch.autograd.gradgradcheck(own, (x,))


def test_the_loss_never_holds_all_logits(text: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of all at once; a target of -100 adds nothing."""
    module, (count, width, vocabulary) = text.module("model"), (50, 16, 97)
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, width) / 4).requires_grad_()
    x = torch.randn(5, count // 5, width, requires_grad=True)
    targets = torch.randint(vocabulary, (5, count // 5))
    targets[1:3, 4] = -100

    def taken(loss: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        largest = [0]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[-1:] == (vocabulary,):  # logits, or their logarithms
                largest.append(tensor.numel())
            return tensor

        x.grad = weight.grad = None
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = loss(x, weight, targets)
        (total / 2).backward()
        return total.detach(), x.grad, weight.grad, max(largest)

    def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x.flatten(0, 1), weight)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    *wanted, largest = taken(plain)
    assert largest == count * vocabulary
    monkeypatch.setattr(module, "MAX_LOGITS", 7 * vocabulary + 3)
    *found, largest = taken(module.Output())
    assert largest <= max(7 * vocabulary, weight.numel()), "more logits than a part's at a time"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    scaled = module.Output()(x, weight, targets) * torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(scaled, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # rather than a wrong one
        gradient.sum().backward()


def test_parts_of_a_loss_are_rounded_no_more_than_all_at_once(
    text: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the weight, which all parts add to: in autocast, and of FSDP's bfloat16."""
    module, (count, width, vocabulary) = text.module("model"), (640, 32, 97)
    torch.manual_seed(0)
    x, weight = torch.randn(count, width), torch.randn(vocabulary, width) / 4
    targets = torch.randint(vocabulary, (count,))

    def gradient(part: int, dtype: torch.dtype, autocast: bool) -> torch.Tensor:
        monkeypatch.setattr(module, "MAX_LOGITS", part * vocabulary)
        own = weight.to(dtype).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module.Output()(x.to(dtype), own, targets).backward()
        return own.grad.double()

    exact = gradient(count, torch.float64, False)
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, False)):
        whole, parts = (
            float((gradient(part, dtype, autocast) - exact).norm() / exact.norm())
            for part in (count, 10)
        )
        assert parts < 1.1 * whole, (dtype, parts, whole)


def test_activation_checkpointing_leaves_alone_what_says_so(text: Project) -> None:
    """Else the loss is computed three times. A block without parameters is recomputed, too."""
    output, block = text.module("model").Output(), torch.nn.ReLU()
    text.module("compile").checkpoint_activations([output, block])
    assert "forward" in vars(block) and "forward" not in vars(output)


@pytest.mark.parametrize("mode", ["none", "blocks", "full"])
def test_the_loss_is_compiled_with_its_logits(
    text: Project, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where something is compiled the compiler sees the head and the loss as one, without parts."""
    module, seen = text.module("model"), []
    of_logits, of_logarithms = F.cross_entropy, F.nll_loss

    def watch_logits(logits: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append((torch.compiler.is_compiling(), len(logits)))
        return of_logits(logits, *rest, **named)

    def watch_logarithms(logarithms: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append((torch.compiler.is_compiling(), len(logarithms)))
        return of_logarithms(logarithms, *rest, **named)

    monkeypatch.setattr(module, "MAX_LOGITS", 100)
    monkeypatch.setattr(F, "cross_entropy", watch_logits)
    monkeypatch.setattr(F, "nll_loss", watch_logarithms)
    changes = {"compile__mode": mode, "compile__backend": "eager"}
    state = text.module("train").setup(text.config(**changes))
    text.module("train").train_step(state, state.loader.next())
    whole = state.config.train.micro_batch_size * state.config.data.context
    assert seen and ((True, whole) in seen) == (mode != "none")
    if mode == "none":
        assert set(seen) == {(False, 1)}, "more than a part at a time"


def separate(project: Project) -> torch.nn.Module:
    """The model of text, whose documents end with a zero byte, in evaluation mode."""
    return model_of(project, data__documents="separate").eval()


def test_documents_do_not_see_each_other(tokens: Project) -> None:
    """Each has the logits that it has alone, its positions starting anew."""
    model = separate(tokens)
    rows = torch.randint(1, VOCABULARY, (3, 32))
    ends = [(4, 17), (0, 31), (9, 10)]
    for row, places in zip(rows, ends, strict=True):
        row[list(places)] = 0
    with torch.no_grad():
        together = model(rows)
        for row, logits, places in zip(rows, together, ends, strict=True):
            first = 0
            for last in (*places, 31):
                alone = model(row[None, first : last + 1])[0]
                torch.testing.assert_close(logits[first : last + 1], alone, rtol=1e-4, atol=1e-5)
                first = last + 1
        other = rows.clone()
        other[0, :4] = 1
        assert torch.equal(model(other)[0, 5:], together[0, 5:])
        assert not torch.equal(model(other)[0, :5], together[0, :5])
        one = torch.randint(1, VOCABULARY, (1, 32))  # of one document all is as ever
        torch.testing.assert_close(model(one), model_of(tokens).eval()(one), rtol=1e-4, atol=1e-5)


def test_no_kernels_are_made_for_a_text_that_is_generated(
    tokens: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has another length at each token; those of training and validation have one."""
    model, makers = separate(tokens), []
    module = tokens.module("model")
    own = module.own_documents

    def noted(row: torch.Tensor, end: int, maker: Any) -> Any:
        makers.append(maker)
        return own(row, end, maker)

    monkeypatch.setattr(module, "own_documents", noted)
    row = torch.zeros(1, 8, dtype=torch.long)
    model(row)
    model(row, row)
    assert makers == [None, model.create_block_mask]


def test_documents_are_separate_in_a_run_and_the_rest_is_said(
    tokens: Project, tmp_path: Path
) -> None:
    for name, content in (("one", "what is this? " * 40), ("two", "it is that. " * 40)):
        (tmp_path / name).write_text(content)
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    words = ("train", "--preset", "tiny", "--device", "cpu", "--data.documents", "separate")
    run = ("--run-dir", str(tmp_path / "run"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two"):
        (tmp_path / name).rename(folder / f"{name}.txt")
    tokens(*words, *run, "--data.path", str(folder), "--compile.mode", "none")
    together = (*words[:-1], "together")
    assert "data" in tokens.refuses(*together, *run, "--data.path", str(folder))
    binary = ("--data.path", str(tmp_path / "tokens.bin"), "--data.vocabulary", "2000")
    assert "--data.end-of-text" in tokens.refuses(*words, *binary, "--name", "of_tokens")


def test_nothing_is_sampled_from_what_is_not_finite(text: Project) -> None:
    infer, generator = text.module("infer"), torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, -torch.inf, 1.0])  # as a mask leaves them
    assert infer.sample(logits, infer.InferConfig(), generator) != 1
    with pytest.raises(text.module("errors").UserError, match="is not finite: use an earlier"):
        infer.sample(logits * torch.nan, infer.InferConfig(temperature=0.0), generator)
    for odd in (torch.nan, torch.inf):
        logits[1] = odd
        with pytest.raises(text.module("errors").UserError, match="is not finite: use an earlier"):
            infer.sample(logits, infer.InferConfig(), generator)
