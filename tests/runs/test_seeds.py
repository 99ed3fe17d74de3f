from tlt_lightning.seeds import seed_of


def test_a_seed_depends_on_each_part_and_on_nothing_else() -> None:
    assert seed_of(3, "train 0", 2, 1) == 1751931613  # another value would change every seeded run
    assert len({seed_of(3, "train 0", 2, rank) for rank in range(100)}) == 100


def test_responses_of_a_group_never_share_their_noise() -> None:
    for draw in (*range(2000), *range(10**6, 10**6 + 2000)):
        assert len({seed_of(0, "draw", draw, member) for member in range(64)}) == 64
