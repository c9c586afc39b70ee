"""Secrets are in no file and in no output; what only sounds like one stays."""

from __future__ import annotations

import json
import re
import time

import pytest

from mindspeed_precision import load_run
from mindspeed_precision.certify.certificate import certify_runs
from mindspeed_precision.cli import main
from mindspeed_precision.dump.writer import RankWriter, update_manifest
from mindspeed_precision.redaction import is_secret_name, redact, redact_text, redact_words
from mindspeed_precision.testing.fake_runs import write_fake_run

HF = "hf_" + "aB3" * 11
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
OPENAI = "sk-proj-" + "Ab1" * 12
NPM, PYPI = "npm_" + "aB3" * 12, "pypi-" + "AgEI" * 12
SECRETS = {
    "HF_TOKEN": HF,
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "wandb_api_key": "local-0123456789",
    "wandb-api-key": "local-0123456789",
    "db_password": "hunter2",
    "dbPassword": "hunter2",
    "user_passwd": "hunter2",
    "oss_credentials": "id:secret",
    "ASCEND_SECRET": "s3cr3t",
    "hub_token": "0123456789abcdef",
    "clientSecret": "s3cr3t",
    "pin_password": 123456,
}
HEALTHY = {
    "tokenizer": "GPT2BPETokenizer",
    "tokenizer_model": "/models/tokenizer.model",
    "tokenizer_type": "HuggingFaceTokenizer",
    "num_tokens": 4096,
    "max_tokens_to_oom": 12000,
    "moe_token_dispatcher_type": "alltoall",
    "moe_token_drop_policy": "probs",
    "eod_token": "<|endoftext|>",
    "pad_token": "[PAD-LONG-ENOUGH]",
    "eos_token": "</s>",
    "image_token": 151655,
    "add_ghost_token": True,
    "key_value_channels": 128,
    "kv_channels": 128,
    "attention_key": "fused_attention",
    "query_key_value": "interleaved",
    "load": "/data/hf_checkpoint_converted_glm4_9b/iter_0000001",
    "data_path": "https://host:8080/data/train_text_document",
    "password_file": "/run/secrets/password",
    "task_queue": "sk-learn-based-pipeline-version-two",
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "use_api_key": True,
    "api_key": "",
    "secret": None,
}


def values():
    return [str(value) for value in SECRETS.values()] + [AWS, OPENAI]


@pytest.mark.parametrize(("name", "value"), SECRETS.items())
def test_a_secret_is_taken_out_by_its_name(name, value):
    found = redact({"outer": {name: value}})["outer"][name]
    assert re.fullmatch(r"<redacted, [0-9a-f]{4}>", found)


@pytest.mark.parametrize(("name", "value"), HEALTHY.items())
def test_what_only_sounds_like_one_stays(name, value):
    assert redact({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"pushed with {HF} to the hub", HF),
        (f"{AWS} was refused", AWS),
        (OPENAI, OPENAI),
        (f"published by {NPM}", NPM),
        (f"{PYPI} was refused", PYPI),
        ("https://user:pw-1234@host/repository", "pw-1234"),
        ("https://host/run?X-Amz-Expires=60&X-Amz-Signature=5ec2e7aa", "5ec2e7aa"),
        ("--init-from abfs://c@account/run?sv=2024&sig=a%2Fb5ec", "a%2Fb5ec"),
        ("Authorization: Bearer abcdefghijklmnop0123", "abcdefghijklmnop0123"),
        ("python train.py --wandb-api-key abc123 --lr 1", "abc123"),
        ("python train.py --wandb-api-key=abc123", "abc123"),
        ("GET /x?api_key=abc123&y=1", "abc123"),
        ("password: hunter2", "hunter2"),
        ("error: login with password=hunter2 failed", "hunter2"),
        ("export DB_PASSWORD='two words'", "two words"),
        ('{"lr": 1, "api_key": "a b", "x": 2}', "a b"),
        ("{'wandb_api_key' : 'abc123'}", "abc123"),
        (r'"--logger={\"api_key\": \"abc123\"}"', "abc123"),
        ('{"password": "ab\\"xyz"}', "xyz"),
        ('"password": "cut of', "cut"),
        ("postgresql://user:pw@1234@host/runs", "1234"),
        ("git+https://0123456789abcdef0123@github.com/x/y", "0123456789abcdef0123"),
        ("Authorization: Token 0123456789abcdef", "0123456789abcdef"),
        ("--wandb-key abc123 --jwt=a.b", "abc123"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("ghp_" + "a1B2" * 9, "a1B2a1B2"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJ", "SflKxwRJ"),
    ],
)
def test_a_secret_is_taken_out_of_a_text(text, secret):
    assert secret not in redact_text(text)
    assert "<redacted, " in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --tokenizer-model /m --num-tokens 5 --eod-token </s> --lr 1e-3",
        "the token is lost, the secret of a good step",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "https://host:8080/a@b",
        "abfs://container-of-runs-01@account.dfs.core.windows.net/run",
        '{"pad_token": "[PAD]", "tokenizer": "abc", "key": "value"}',
        "https://host/run?step=5&signal=loss",
        "s3://bucket/key=value/part",
        "RuntimeError: expected key: 'weight', found: 'bias'",
    ],
)
def test_an_ordinary_text_stays(text):
    assert redact_text(text) == text


def test_equality_can_still_be_compared_and_twice_changes_nothing():
    one, same, other = (redact({"api_key": value})["api_key"] for value in ("a" * 20, "a" * 20, "b" * 20))
    assert one == same != other
    document = redact({**SECRETS, "words": ["--api-key", "abc", "--lr", "1"]})
    assert redact(document) == document


def test_words_of_a_command_line():
    words = [
        "train.py",
        "--wandb-api-key",
        "abc",
        "--hub-token",
        "--lr",
        "1",
        "--secret=x",
        "--tokenizer",
        "y",
    ]
    found = redact_words(words)
    assert [one.startswith("<redacted") for one in found] == [False, False, True, *[False] * 6]
    assert found[6].startswith("--secret=<redacted")
    assert found[3:6] == words[3:6]  # an option without a value
    assert found[7:] == words[7:]


@pytest.mark.parametrize("word", ["--db-password=ab,cd", "DB_PASSWORD=x ab;cd", "--a.api-key='ab'cd"])
def test_a_word_that_gives_a_secret_its_value_is_that_value_to_its_end(word):
    (found,) = redact_words([word])
    assert re.fullmatch(r"[^=]+=<redacted, [0-9a-f]{4}>", found)
    assert redact_words([found]) == [found]


@pytest.mark.torch
@pytest.mark.megatron
def test_no_argument_of_megatron_is_taken_for_a_secret(cpu_megatron):
    """Every option that the installed versions have, with a value that could be one."""
    options = set()
    for tree in cpu_megatron.parent.iterdir():
        for file in (tree / "megatron").rglob("*.py"):
            options |= set(re.findall(r"""["']--([a-z][a-z0-9-]+)["']""", file.read_text(errors="replace")))
    if not options:
        pytest.skip("this megatron-core has no arguments")
    assert {name for name in options if is_secret_name(name)} <= {"add-ghost-token"}


@pytest.mark.parametrize(
    "text",
    [
        "-a" * 50_000,
        "eyJ" * 40_000,
        "://a:" * 20_000,
        "-----BEGIN " * 10_000,
        "--a '" * 20_000,
        "a=b " * 30_000,
    ],
)
def test_a_text_that_is_made_to_be_slow_is_not(text):
    began = time.process_time()
    redact_text(text)
    assert time.process_time() - began < 5


def test_many_secrets_do_not_take_for_ever():
    began = time.process_time()
    found = redact({f"api_key_{number}_secret": f"value{number}" for number in range(10_000)})
    assert all(value.startswith("<redacted") for value in found.values())
    assert time.process_time() - began < 30


def test_no_file_of_a_run_and_no_output_has_a_secret(tmp_path, capsys, monkeypatch):
    """Planted in arguments, environment, findings and settings; looked for in every byte that is written."""
    monkeypatch.chdir(tmp_path)
    manifest = {
        "environment": {"ASCEND_SECRET": SECRETS["ASCEND_SECRET"], "HCCL_X": AWS},
        "launch": ["--wandb-api-key", SECRETS["wandb_api_key"]],
        "label": f"with {OPENAI}",
    }
    runs = []
    for name in ("baseline", "candidate"):
        arguments = {**SECRETS, "hub_token": f"token-of-{name}-0123"}
        runs.append(write_fake_run(tmp_path / name, megatron_args=arguments, manifest=manifest))
        finding = {"id": "env.x", "title": f"HF_TOKEN={HF}", "severity": "warning", "evidence": [AWS]}
        update_manifest(runs[-1], {"findings": [finding]})
    main(["compare", *map(str, runs), "--out", "out"])
    main(["verify", *map(str, runs)])
    main(["check", str(runs[0])])
    main(["show", str(runs[0])])
    text = capsys.readouterr()
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    for secret in [*values(), "token-of-baseline-0123"]:
        if len(secret) > 6:  # a short one is a part of other words
            assert secret not in written + text.out + text.err


def test_a_run_that_an_older_version_wrote_shows_no_secret(tmp_path):
    run = write_fake_run(tmp_path / "run")
    plain = json.loads((run / "run.json").read_text())
    plain["config"]["megatron_args"]["wandb_api_key"] = SECRETS["wandb_api_key"]
    (run / "run.json").write_text(json.dumps(plain))
    assert SECRETS["wandb_api_key"] not in str(load_run(run).manifest)


def test_files_of_a_rank_and_a_certificate_have_none(tmp_path):
    runs = [write_fake_run(tmp_path / name) for name in ("one", "two")]
    certificate = certify_runs(*runs, launch=["train.py", "--hub-token", SECRETS["hub_token"]])
    assert SECRETS["hub_token"] not in str(certificate)
    writer = RankWriter.__new__(RankWriter)
    writer.directory = tmp_path
    writer.write_findings([{"title": f"with {HF}"}])
    writer.write_effective({"groups": [{"settings": {"api_key": "abc123456"}}]})
    text = (tmp_path / "findings.json").read_text() + (tmp_path / "effective.json").read_text()
    assert HF not in text
    assert "abc123456" not in text


def test_what_preflight_says_has_none(capsys):
    secret = SECRETS["hub_token"]
    main(["preflight", "--", "train.py", "--hub-token", secret, "--hub-token", secret])
    captured = capsys.readouterr()
    assert "--hub-token" in captured.out
    assert secret not in captured.out + captured.err
