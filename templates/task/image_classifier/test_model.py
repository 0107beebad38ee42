@pytest.fixture(scope="module")
def batch(state: State) -> dict[str, torch.Tensor]:
    """Return a micro-batch of images and labels; skip the test if the data is not images."""
    if not has_first_batches(state):
        pytest.skip("not applicable: a batch is not {'images': ..., 'labels': ...}")
    return state.loader.of(0, state.plan)[0]


@torch.no_grad()
def logits_of(state: State, images: torch.Tensor) -> torch.Tensor:
    """Return logits in evaluation mode; skip the test if the model does not return logits."""
    state.model.eval()
    logits = state.model(images)
    state.model.train()
    if not isinstance(logits, torch.Tensor) or logits.shape != (len(images), classes_of(state)):
        pytest.skip("not applicable: model(images) returns no logits")
    return logits.float()


def classes_of(state: State) -> int:
    """Return the number of classes."""
    classes = getattr(state.spec, "classes", 0)
    return classes if isinstance(classes, int) else len(classes)


def first_model() -> torch.nn.Module:
    """Return the template's own model; skip the test if the model was replaced."""
    model = setup(tiny(Path("unused"))).model.eval()
    block = next(iter(blocks(model)), None)
    if not all(hasattr(block, name) for name in ("norm1", "conv1", "norm2", "conv2")):
        pytest.skip("not applicable: another model")
    return model


def test_a_batch_is_of_images_and_the_numbers_of_their_classes(
    state: State, batch: dict[str, torch.Tensor]
) -> None:
    """A batch has float32 images [batch, channels, height, width] and int64 labels [batch]."""
    images, labels = batch["images"], batch["labels"]
    size = state.config.train.micro_batch_size
    assert len(images) == size and images.ndim == 4 and images.dtype == torch.float32
    assert labels.shape == (size,) and labels.dtype == torch.int64
    assert 0 <= int(labels.min()) <= int(labels.max()) < classes_of(state)


@torch.no_grad()
def test_the_loss_is_that_of_the_labels(state: State, batch: dict[str, torch.Tensor]) -> None:
    """The loss is the summed cross-entropy, and accuracy counts the labels with the top logit."""
    logits, labels = logits_of(state, batch["images"]), batch["labels"]
    # In evaluation mode there is no dropout, as in `logits_of`.
    state.model.eval()
    loss = compute_loss(state.model, batch)
    state.model.train()
    expected = F.cross_entropy(logits, labels, reduction="sum")
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4)
    assert int(loss.count) == len(labels)
    if "accuracy" in loss.metrics:
        state.model.eval()
        # With the top classes as labels all are right, with the lowest ones all are wrong.
        right = compute_loss(state.model, {**batch, "labels": logits.argmax(dim=1)})
        wrong = compute_loss(state.model, {**batch, "labels": logits.argmin(dim=1)})
        state.model.train()
        assert int(right.metrics["accuracy"]) == len(labels)
        assert int(wrong.metrics["accuracy"]) == 0


def test_an_image_changes_no_logit_of_another(state: State, batch: dict[str, torch.Tensor]) -> None:
    """All images but the first are inverted: the logits of the first stay, the others change."""
    images = batch["images"]
    others = torch.cat([images[:1], 1 - images[1:]])
    logits, changed = logits_of(state, images), logits_of(state, others)
    torch.testing.assert_close(changed[0], logits[0])
    assert not torch.allclose(changed[1:], logits[1:])


def test_each_part_of_an_image_counts(state: State, batch: dict[str, torch.Tensor]) -> None:
    """A change of the pixel in any corner changes the logits."""
    first_model()
    images = batch["images"][:1]
    logits = logits_of(state, images)
    height, width = images.shape[2:]
    for row in (0, height - 1):
        for column in (0, width - 1):
            changed = images.clone()
            changed[:, :, row, column] += 1
            assert not torch.equal(logits_of(state, changed), logits)


def test_the_first_loss_is_the_logarithm_of_the_number_of_classes(
    state: State, batch: dict[str, torch.Tensor]
) -> None:
    """An untrained model gives all classes about the same probability."""
    loss = compute_loss(state.model, batch)
    ratio = loss.total.item() / float(loss.count) / math.log(classes_of(state))
    if not 0.9 < ratio < 1.1:
        # Skips the test if the model was replaced: its initial logits may be larger.
        first_model()
    assert 0.9 < ratio < 1.1


def test_each_parameter_has_a_gradient(state: State, batch: dict[str, torch.Tensor]) -> None:
    first_model()
    compute_loss(state.model, batch).total.backward()
    for name, p in state.model.named_parameters():
        assert p.grad is not None and p.grad.any(), name
        p.grad = None


@torch.no_grad()
def test_a_block_adds_to_what_it_is_given() -> None:
    """A block adds convolutions of its normalized input, so the scale of the input does not matter.

    Without the last convolution it adds nothing.
    """
    model = first_model()
    for block in model.blocks:
        # Two images of 8 x 8 pixels, with the channels of the block.
        x = torch.randn(2, block.conv1.weight.shape[1], 8, 8)
        added = block(x) - x
        assert added.abs().mean() > 1e-3
        torch.testing.assert_close(block(3 * x) - 3 * x, added, rtol=1e-2, atol=1e-3)
        block.conv2.weight.zero_()
        torch.testing.assert_close(block(x), x)
