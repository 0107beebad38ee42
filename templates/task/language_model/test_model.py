@pytest.fixture(scope="module")
def tokens(state: State) -> torch.Tensor:
    """Return a micro-batch of tokens [batch, context + 1]; skip the test for other data."""
    if not has_first_batches(state):
        pytest.skip("not applicable: a batch is not {'tokens': ...}")
    return state.loader.of(0, state.plan)[0]["tokens"]


@torch.no_grad()
def logits_of(state: State, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [batch, time, vocabulary] in evaluation mode; skip the test without logits."""
    state.model.eval()
    output = state.model(tokens.long())
    state.model.train()
    if not isinstance(output, torch.Tensor):
        output = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    if output is None or output.shape[:2] != tokens.shape:
        pytest.skip("not applicable: model(tokens) returns no logits")
    return output.float()


def first_model(**changes: Any) -> torch.nn.Module:
    """Return the project's first model, with larger weights; skip the test if it was replaced.

    The initial weights are so small that each layer changes its input only a little.
    """
    model = setup(tiny(Path("unused"), **changes)).model.eval()
    block = next(iter(blocks(model)), None)
    names = ("attention", "up", "down", "norm1", "norm2")
    if not all(hasattr(block, name) for name in names) or not hasattr(model, "table"):
        pytest.skip("not applicable: another model")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p *= 10
    return model


def test_a_batch_is_of_tokens(state: State, tokens: torch.Tensor) -> None:
    """Each row has the context and one more token, the last target."""
    data = state.config.data
    assert tokens.shape == (state.config.train.micro_batch_size, data.context + 1)
    assert tokens.dtype in (torch.uint8, torch.int32)
    assert int(tokens.max()) < state.spec.vocabulary


@torch.no_grad()
def test_the_targets_are_the_tokens_that_follow(state: State, tokens: torch.Tensor) -> None:
    """The loss is the cross-entropy of each next token, each counted once."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].long()
    logits = logits_of(state, inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    # In evaluation mode there is no dropout, as in `logits_of`.
    state.model.eval()
    loss = compute_loss(state.model, {"tokens": tokens})
    state.model.train()
    assert int(loss.count) == targets.numel()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, bits in loss.metrics.items():
        if name.startswith("bits_per_"):
            assert float(bits) == pytest.approx(expected.item() / math.log(2), rel=1e-4)


def test_a_later_token_changes_no_earlier_logit(state: State, tokens: torch.Tensor) -> None:
    """It changes logits only from its own position on, and only in its own row of the batch."""
    tokens = tokens[:, :-1].long()
    logits = logits_of(state, tokens)
    last = tokens.shape[1] - 1
    # Change one token in the first row: near the start, in the middle, or at the end.
    for place in {0, 1, last // 2, last}:
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % state.spec.vocabulary
        others = logits_of(state, changed)
        torch.testing.assert_close(others[0, :place], logits[0, :place])
        torch.testing.assert_close(others[1:], logits[1:])
        # At its own position, and at most of the later ones, the logits do change.
        unequal = (others[0, place:] != logits[0, place:]).any(dim=-1)
        assert unequal[0] and unequal.float().mean() > 0.5


def test_the_first_loss_is_the_logarithm_of_the_vocabulary(
    state: State, tokens: torch.Tensor
) -> None:
    """An untrained model gives all tokens about the same probability."""
    loss = compute_loss(state.model, {"tokens": tokens})
    ratio = loss.total.item() / float(loss.count) / math.log(state.spec.vocabulary)
    assert ratio > 0.9, "an untrained model predicts its targets: do they leak into its inputs?"
    if ratio > 1.1:
        # Skips the test if the model was replaced: its initial logits may be larger.
        first_model()
    assert ratio < 1.1


def test_each_parameter_has_a_gradient(state: State, tokens: torch.Tensor) -> None:
    first_model()
    compute_loss(state.model, {"tokens": tokens}).total.backward()
    for name, p in state.model.named_parameters():
        assert p.grad is not None and p.grad.any(), name
        p.grad = None


def test_what_is_added_to_the_residual_stream_starts_smaller_in_deep_models(state: State) -> None:
    """The matrices that add to it, two per layer, are smaller by the root of their number."""
    first_model()
    depth = math.sqrt(2 * state.config.model.layers)
    for block in state.model.blocks:
        for weight in (block.attention.out.weight, block.down.weight):
            ratio = (block.up.weight.std() / weight.std()).item()
            assert ratio == pytest.approx(depth, rel=0.1)


@torch.no_grad()
def test_a_block_adds_to_what_it_is_given() -> None:
    """A block adds attention and an MLP of the normalized input, whose scale does not matter."""
    model = first_model()
    block, table = model.blocks[0], model.table
    x = torch.randn(2, table.shape[1], model.embedding.weight.shape[1])
    # Silence attention, then the MLP, by zeros in its last matrix: the other one still adds.
    for silent in (block.attention.out, block.down):
        weight = silent.weight.clone()
        silent.weight.zero_()
        added = block(x, table) - x
        assert added.abs().mean() > 1e-3
        torch.testing.assert_close(block(3 * x, table) - 3 * x, added, rtol=1e-3, atol=1e-3)
        silent.weight.copy_(weight)
    # Silence both: the block adds nothing.
    for module in (block.attention.out, block.down):
        module.weight.zero_()
    torch.testing.assert_close(block(x, table), x)


@torch.no_grad()
def test_attention_depends_on_distances_and_on_order() -> None:
    """Shifting all positions changes nothing (rotary embedding); swapping two tokens does."""
    model = first_model()
    attention, table = model.blocks[0].attention, model.table
    # Half of the context, so that the positions can be shifted by 5.
    time = table.shape[1] // 2
    x = torch.randn(2, time, model.embedding.weight.shape[1])
    y = attention(x, table[:, :time])
    torch.testing.assert_close(attention(x, table[:, 5 : 5 + time]), y, rtol=1e-3, atol=1e-3)
    # Two earlier tokens change places: the last output changes.
    exchanged = x.clone()
    exchanged[:, 0], exchanged[:, 3] = x[:, 3], x[:, 0]
    difference = (attention(exchanged, table[:, :time])[:, -1] - y[:, -1]).abs().mean()
    assert difference > 1e-3 * y.abs().mean()
    # The last output depends on every position up to its own.
    for place in (0, time - 1):
        changed = x.clone()
        changed[:, place] += 1
        assert not torch.allclose(attention(changed, table[:, :time])[:, -1], y[:, -1])


def test_a_loss_in_parts_is_the_same_loss(tokens: torch.Tensor, monkeypatch) -> None:
    """The logits of all rows at once, or of a few at a time, give the same loss and gradients."""
    model = first_model()
    # The file that defines the model: model.py, or another one that it imports.
    module = sys.modules[type(model.output).__module__]
    results = []
    # Few tokens have less than 2**28 logits. 2000 logits are 7 rows of 256, so there are chunks.
    for most_logits in (2**28, 2000):
        monkeypatch.setattr(module, "MAX_LOGITS", most_logits)
        total = compute_loss(model, {"tokens": tokens}).total
        total.backward()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"loss": total})
        # Without gradients the loss is computed by other code.
        with torch.no_grad():
            results[-1]["evaluated"] = compute_loss(model, {"tokens": tokens}).total
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
