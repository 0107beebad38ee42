def all_of(dataset: Any) -> tuple[torch.Tensor, list[int]]:
    """Return all images of a dataset and their labels; skip the test if the data is not images."""
    batch = read(dataset, list(range(len(dataset))))
    if not isinstance(batch, dict) or not {"images", "labels"} <= batch.keys():
        pytest.skip("not applicable: other data")
    return batch["images"], batch["labels"].tolist()


def test_images_of_a_file_have_their_labels(tmp_path: Path) -> None:
    """Each image is used for training or validation, scaled to 0 ... 1.

    There are 40 images of height 4, width 5 and 3 channels. The pixels of image n have the value n,
    and its label is n % 7. So a pixel shows which label it must have.
    """
    numbers = np.arange(1, 41)
    images = np.zeros((40, 4, 5, 3), np.uint8) + numbers[:, None, None, None].astype(np.uint8)
    # One pixel is black in each image. The brightest value of the data, 80, becomes 1.
    images[:, 0, 0, 0] = 0
    images[-1, 0, 0, 1:] = 80
    np.savez(tmp_path / "images.npz", images=images, labels=numbers % 7)
    training, validation, spec = own_data(path=tmp_path / "images.npz")
    seen = []
    for part in (training, validation):
        pixels, labels = all_of(part)
        assert pixels.shape[1:] == (3, 4, 5) and pixels.dtype == torch.float32
        # A pixel in the opposite corner has the number of the image.
        found = (pixels[:, 2, 3, 4] * 80).round().int().tolist()
        assert labels == [number % 7 for number in found]
        assert pixels[:, 0, 0, 0].abs().max() == 0
        seen.append(found)
    assert sorted(seen[0] + seen[1]) == numbers.tolist()
    assert all_of(training)[0].max() == 1
    # One image in five is for validation.
    assert len(seen[1]) == 8
    assert len(spec.classes) == 7


def test_images_of_folders_have_their_labels(tmp_path: Path) -> None:
    """Folders train and val split the images; without these, a hash of the names does.

    Cats have the grey values 50 ... 69, dogs 200 ... 219. So a pixel shows which image it is of. In
    the folder `split`, images with even values are in train, those with odd values in val.
    """
    from PIL import Image

    shades = {"cat": 50, "dog": 200}
    for name, shade in shades.items():
        for number in range(20):
            for folder in (tmp_path / "plain", tmp_path / "split" / ("train", "val")[number % 2]):
                (folder / name).mkdir(parents=True, exist_ok=True)
                pixels = np.full((4, 4), shade + number, np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{number}.png")
    for folder in ("plain", "split"):
        training, validation, spec = own_data(path=tmp_path / folder)
        seen = []
        for part in (training, validation):
            pixels, labels = all_of(part)
            found = (pixels[:, 0, 2, 2] * 255).round().int().tolist()
            assert [spec.classes[label] for label in labels] == [
                "cat" if shade < 150 else "dog" for shade in found
            ]
            seen.append(found)
        assert sorted(seen[0] + seen[1]) == [*range(50, 70), *range(200, 220)]
        if folder == "split":
            assert {shade % 2 for shade in seen[0]} == {0}
            assert {shade % 2 for shade in seen[1]} == {1}
        else:
            assert 0 < len(seen[1]) < len(seen[0])


def test_training_images_are_shifted_and_no_others(state: State) -> None:
    """Each image is shifted by at most --data.max-shift, as its key says, and padded with 0.

    With a shift of at most 2, there are 5 shifts down times 5 across. Each of these 25 is found
    among 300 images.
    """
    training, validation, _ = own_data(max_shift=2)
    images = torch.rand(300, 1, 4, 5)
    batch = {"images": images, "labels": torch.zeros(len(images))}
    keys = np.random.default_rng(0).integers(0, 2**63, len(images)).astype(np.uint64)
    shifted = training.augment(batch, keys)["images"]
    padded = torch.nn.functional.pad(images, [2] * 4)
    shifts = set()
    # An image is one window of its padded original.
    for before, after in zip(padded, shifted, strict=True):
        (shift,) = [
            (row, column)
            for row in range(5)
            for column in range(5)
            if torch.equal(before[:, row : row + 4, column : column + 5], after)
        ]
        shifts.add(shift)
    assert len(shifts) == 25
    assert torch.equal(training.augment(batch, keys)["images"], shifted)
    assert torch.equal(validation.augment(batch, keys)["images"], images)

    # A batch of training is augmented: it differs from the same samples as the dataset has them.
    seen = state.loader.of(0, state.plan)[0]["images"]
    ids = state.loader.source.order.ids(0)[state.plan[0].indices]
    assert not torch.equal(seen, fetch(state.loader.source.dataset, ids)["images"])


def test_a_change_of_the_data_changes_its_fingerprint(tmp_path: Path) -> None:
    images, labels = np.ones((40, 4, 5), np.uint8), np.arange(40) % 7
    seen = set()
    # The data as it is, with another pixel, and with another label.
    for pixel, label in ((1, 0), (2, 0), (1, 3)):
        images[3, 2, 1], labels[7] = pixel, label
        np.savez(tmp_path / "images.npz", images=images, labels=labels)
        seen.add(own_data(path=tmp_path / "images.npz")[2].fingerprint)
    assert len(seen) == 3
