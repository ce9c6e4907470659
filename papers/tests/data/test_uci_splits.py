"""The splits and folds of the UCI sets are those of the published code."""

import hashlib

import numpy as np
import pytest
from batchbayes_papers.data.uci import SETS, published_folds, published_split
from hypothesis import given, settings
from hypothesis import strategies as st

# Name, rows, seed, number of test rows, first five test rows, SHA-256 of all test rows (sorted, joined by commas).
PUBLISHED = """
boston 506 1 101 307 343 47 67 362 db79bd77f4d554b4ab7128f58f38d97657d47f4c29287eb3997197af93a52774
boston 506 2 101 463 152 291 183 384 262558aa8e72cac77efbb27679592c195f989f67d792e05b76649396f8a1aa68
boston 506 3 101 224 137 453 303 254 91eb01a87ff38055b8c73805f2bc41c03d2911567195beecf528f80f75095fb7
boston 506 4 101 8 289 68 211 226 148d693d0287cb2932c1e0ee05e8c762be1ae539401cbfdfa6a956b553bf0fec
boston 506 5 101 226 292 90 373 273 05b1b8971c93343db1132c439d953858c116170fb565034c9358a9d4802a6a79
concrete 1030 1 206 339 244 882 567 923 f58e9747285ed48a0b1baaa74edcc2c4ec5feec1b2eb7b10bbfc17696e7cc3d8
concrete 1030 2 206 456 988 809 581 549 fefd59fbb415cd4d102b1b27b81f9b1d3cd5396d2ccbd63fd34e3e5d40eec57c
concrete 1030 3 206 949 1020 958 555 175 22a371f6b945dec6f8c8e78578641264367a27478f1494279b695140eaaf82d4
concrete 1030 4 206 522 701 563 678 98 7cbb3fe807fe687ddc62c335ae7ee6315a74d58cb8c715d31922d0f5c9aa01e0
concrete 1030 5 206 34 33 478 614 236 5da1454a0d3fabc0c0c0c0ca0f59d4c23de611e295f858bdc84a338ba834d7ca
energy 768 1 154 285 101 581 352 726 661f61b136241dbfc63c82b0e72fa10e3737faddc4be631d2da26cefa0f79179
energy 768 2 154 158 251 631 757 689 4bd501558bc1d7c9524ef2864c1e671e1d7a177956f4c1c0a56c83d7fb41f0f6
energy 768 3 154 51 378 27 579 86 9009dfe2eee4b999d6bf37e99b69e8f474ae0231513769afc452abbe1e51ae5b
energy 768 4 154 390 146 136 420 328 69b951d0ddcb23ed0c46f6d641a895c9252174209a8e7af68faf57465a3b500e
energy 768 5 154 567 123 615 492 288 b9a8fe9680d0387490fb7a319092cd5459faf09c2e1dae7f71cce601061a6e82
kin8nm 8192 1 1638 3894 4276 3414 4165 7385 e24d9537d2609f03e0a8423dcfe5d32f53686d0afa82f225b41fe413408cb796
kin8nm 8192 2 1638 2116 7851 2120 8178 7067 b71287d2d1d414b7bb51e4d0cf255ffa84a86ff9969671b70d74506d8dbcc3bb
kin8nm 8192 3 1638 7912 2273 6642 5144 1128 f09b6977877063dee56c9494d1bbf0db0a9340e0cb4b260552a77596fa1613fe
kin8nm 8192 4 1638 8127 5313 2960 7006 1560 d57d4336f21de05b0fcb3921667123bda8c6e104fcd69aef600c1622df607963
kin8nm 8192 5 1638 8112 6621 8135 4172 4596 0b1d79e52ecc616f7f821b5394c1b4d063f5d04e401603accad8f97ee33a2287
power 9568 1 1914 5014 6947 9230 4290 6477 cc3e98578402956efb583d51bd20141b33060976ab44e80a3b6c6ea0fc0c7ad8
power 9568 2 1914 2843 9115 4618 4205 9181 61caedc2392d969c4708cc26653c1b8790ce6e2a82f283931b62aa5632e96723
power 9568 3 1914 213 6673 528 3616 8982 f2f0a39e059491796af450be48766fb318a7f4e6287f8d419e5cfe772f3f9065
power 9568 4 1914 8164 3894 6322 1668 8818 55b30ced342e6073cd72c3310f31215f1d7d2caecb977bb47119bfd4c9c37abc
power 9568 5 1914 6167 8395 6736 919 3099 7a4863404000752a50a8c42d4d115eb2bf23fac289bb0b6f8fcb18bd21912f4e
protein 45730 1 9146 13171 38548 22657 34039 34817 20646e925a5f59184a2bec48d74fb3f127a5b80b8d2cef6391c87359304eebc6
protein 45730 2 9146 13616 43753 29519 45162 42001 10adf2e7e0258561e6cb33bdc61b65195e5906e8d7b79668d5f7333e29c9b057
protein 45730 3 9146 34634 42124 39097 3785 10030 9fb8d8f7deb1b7856ed182657a8dee0e6e233ce1d9379167b58ddb13c2e5a356
protein 45730 4 9146 26350 38234 11783 6967 6437 8cad6c62141fbd2861b8eacf13c47a04949b16d0ff83b53282b8d06368f10617
protein 45730 5 9146 31290 38138 41353 34090 40371 0a8fcd892229d0c68bbd556c70022ba67363d256a257c16f24f8fedb18639559
wine 1599 1 320 75 1283 408 1281 1118 f6ab9f1dcb32ac14ce3bd54bbf495ce698778e188fb71ccc6569dfe5536195b1
wine 1599 2 320 407 1220 1200 308 1328 b0c88f4183753f4bf85bfda20dcc92030fd8b0c039a61f64e2e6c909885f8a01
wine 1599 3 320 147 937 877 1000 73 f4e113ba9f0ed96dd32ec2bb108b36ded3d27d1d433b58057bca7f3f0368b113
wine 1599 4 320 289 962 826 495 57 99aac3eac3c97ef31896a3e6e8db240d068291e21813f0ce08762fdfe37823e6
wine 1599 5 320 236 833 424 982 1155 78065da69b9e2cebd39c78939df6a2885db228c035ed1d510b1f296ed34a3a8e
yacht 308 1 62 73 304 228 238 259 af56628470af662156670a1bb579d8a30ab378228618612ec0a5d988a4495323
yacht 308 2 62 172 273 7 84 214 3bc24f14930ca755a543c74d0726410e1316b965ed31f49940bdf5f408d466cf
yacht 308 3 62 157 296 143 243 276 d518bf890df84a90f6d8edae2ee197bbc28d0acfe226d364dd44e2f9f6a572a6
yacht 308 4 62 33 300 34 208 303 2c119aac298d8958e246ce7805b6632bfc2b88560eaa67c208ef224d443d3311
yacht 308 5 62 132 227 167 198 50 2be453e6783f4b59dcce0c83719e38f2dc52042b2cc22760b514724a3c987f1d
"""


@pytest.mark.parametrize("line", PUBLISHED.split("\n")[1:-1], ids=lambda line: "-".join(line.split()[:3:2]))
def test_the_splits_are_the_published_ones(line):
    name, num_rows, seed, num_test, *first, digest = line.split()
    train, test = published_split(int(num_rows), int(seed))
    assert SETS[name].num_rows == int(num_rows)
    assert len(test) == int(num_test)
    assert [str(row) for row in test[:5]] == first
    assert hashlib.sha256(",".join(map(str, sorted(test.tolist()))).encode()).hexdigest() == digest
    shuffled = list(range(int(num_rows)))
    np.random.RandomState(int(seed)).shuffle(shuffled)
    assert [*test.tolist(), *train.tolist()] == shuffled


@given(num_rows=st.integers(10, 2000), seed=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_folds_are_those_of_a_shuffled_list(num_rows, seed):
    train, _ = published_split(num_rows, seed)
    before, rows = train.copy(), train.tolist()
    np.random.RandomState(1).shuffle(rows)
    folds, start = published_folds(train), 0
    assert len(folds) == 5
    for number, (fold_train, validation) in enumerate(folds):
        size = len(rows) // 5 + (number < len(rows) % 5)
        assert validation.tolist() == rows[start : start + size]
        assert fold_train.tolist() == sorted(set(rows) - set(validation.tolist()))
        start += size
    assert start == len(rows)
    assert np.array_equal(before, train)


def test_the_global_generator_is_left_alone():
    np.random.seed(3)
    first = np.random.random()
    np.random.seed(3)
    published_folds(published_split(100, seed=1)[0])
    assert np.random.random() == first
