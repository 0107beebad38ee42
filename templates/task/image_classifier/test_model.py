def test_a_batch_is_of_images_and_the_numbers_of_their_classes(state: State) -> None:
    batch, spec = state.loader.next()[0], state.spec
    images, labels = batch["images"], batch["labels"]
    size = state.config.train.micro_batch_size
    assert images.shape[:2] == (size, spec.channels) and images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    assert labels.shape == (size,) and labels.dtype == torch.int64
    loss = compute_loss(lambda _: 100.0 * F.one_hot(labels, len(spec.classes)), batch)
    assert (loss.total.item(), loss.count, int(loss.metrics["accuracy"])) == (0, size, size)


def test_an_image_changes_no_logit_of_another(state: State) -> None:
    images = state.loader.next()[0]["images"]
    others = torch.cat([images[:1], 1 - images[1:]])
    logits, changed = state.module(images), state.module(others)
    torch.testing.assert_close(changed[0], logits[0])
    assert not torch.allclose(changed[1:], logits[1:])


def test_the_first_loss_is_the_logarithm_of_the_number_of_classes(state: State) -> None:
    loss = compute_loss(state.module, state.loader.next()[0])
    expected = math.log(len(state.spec.classes))
    assert loss.total.item() / loss.count == pytest.approx(expected, rel=0.1)
