def test_the_targets_are_the_tokens_that_follow(state: State) -> None:
    (batch, *_), data = state.loader.next(), state.config.data
    tokens = batch["tokens"]
    assert tokens.shape == (state.config.train.micro_batch_size, data.context + 1)
    assert tokens.dtype in (torch.uint8, torch.int32)
    assert int(tokens.max()) < state.spec.vocabulary

    def seen(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert torch.equal(inputs, tokens[:, :-1]) and torch.equal(targets, tokens[:, 1:])
        return torch.zeros(())

    assert compute_loss(seen, batch).count == tokens[:, 1:].numel()


def test_the_loss_is_that_of_the_logits(state: State) -> None:
    tokens = state.loader.next()[0]["tokens"].long()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    state.model.eval()  # dropout draws other numbers each time
    logits = state.model(inputs).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    assert state.model(inputs, targets).item() == pytest.approx(expected.item())
    state.model.train()


def test_a_later_token_changes_no_earlier_logit(state: State) -> None:
    tokens = state.loader.next()[0]["tokens"][:, :-1].long()
    half = tokens.shape[1] // 2
    others = torch.cat([tokens[:, :half], tokens[:, half:].flip(0)], dim=1)
    logits, changed = state.module(tokens), state.module(others)
    torch.testing.assert_close(changed[:, :half], logits[:, :half])
    assert not torch.allclose(changed[:, half:], logits[:, half:])


def test_the_first_loss_is_the_logarithm_of_the_vocabulary(state: State) -> None:
    loss = compute_loss(state.module, state.loader.next()[0])
    expected = math.log(state.spec.vocabulary)
    assert loss.total.item() / loss.count == pytest.approx(expected, rel=0.1)


def test_what_is_added_to_the_residual_stream_starts_smaller_in_deep_models(state: State) -> None:
    depth = math.sqrt(2 * state.config.model.layers)
    for block in state.model.blocks:
        for weight in (block.attention.out.weight, block.down.weight):
            ratio = (block.up.weight.std() / weight.std()).item()
            assert ratio == pytest.approx(depth, rel=0.1)
