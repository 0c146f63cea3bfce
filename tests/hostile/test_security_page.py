"""SECURITY.md says what is tested: each of its sentences about what stops whom names its tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("What is protected, and against which attackers", "Setting it up")
CLAIMS: dict[str, tuple[str, ...]] = {
    # What is protected, and against which attackers
    "TLS; plaintext beyond the loopback": (
        "service/test_transport.py::test_an_encrypted_server_does_not_answer_in_the_clear",
        "service/test_transport.py::test_a_server_that_others_could_hear_does_not_start",
    ),
    "Each call names its process": (
        "service/test_session_users.py::test_a_buffers_description_names_its_sessions_other_users",
        "service/test_session_users.py::test_a_session_that_another_process_uses_is_ended_only_by_taking_it_over",
    ),
    "no call but the health check is answered without a token": (
        "service/test_authorization.py::test_nothing_is_answered_to_a_caller_who_is_not_known",
        "service/test_authorization.py::test_a_probe_needs_no_token",
    ),
    "a refusal waits for no message": (
        "hostile/test_transport.py::test_calls_whose_messages_never_come",
        "hostile/test_transport.py::test_messages_that_are_never_finished",
        "hostile/test_malformed_messages.py::test_a_refused_request_is_let_go_at_once",
        "hostile/test_hostile_producers.py::test_messages_of_a_great_many_parts_cost_little_more_than_their_bytes",
    ),
    "one table of methods and roles": (
        "service/test_authorization.py::test_the_table_has_every_method_of_the_service_and_no_other",
        "service/test_authorization.py::test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    "| `viewer` | WatchModel": (
        "service/test_viewer.py::test_a_viewer_reads_by_a_cursor_and_ends_its_read",
        "service/test_viewer.py::test_a_viewer_ends_neither_a_learners_lease_nor_another_viewers",
    ),
    "A viewer, such as the console, gets": (
        "service/test_viewer.py::test_a_viewer_is_told_a_store_of_its_own",
        "integration/test_redis_users.py::test_a_viewer_reads_payloads_in_redis_and_can_neither_delete_nor_replace_them",
    ),
    "patterns of buffers and workers in the token": (
        "service/test_tenancy.py::test_every_method_whose_request_names_a_buffer_is_bound_by_it",
        "service/test_tenancy.py::test_a_call_is_let_in_for_whom_it_is_meant_and_for_nobody_else",
        "service/test_tenancy.py::test_what_is_refused_does_not_tell_whether_there_is_such_a_buffer",
        "service/test_tenancy.py::test_a_lease_of_another_team_is_none_in_a_buffer_of_ones_own",
        "service/test_tenancy.py::test_a_payload_of_another_team_is_none_whoever_names_its_id",
        "service/test_tenancy.py::test_a_team_that_reads_much_ends_its_own_read_leases_and_no_other_teams",
        "integration/test_gateway.py::test_nobody_announces_what_somebody_else_wrote",
    ),
    "sizes are compared with the store": (
        "hostile/test_hostile_producers.py::test_a_byte_that_claims_to_be_a_whole_buffer_evicts_nobody",
        "hostile/test_hostile_producers.py::test_payloads_that_claim_a_great_many_pieces_are_refused_before_one_is_named",
        "hostile/test_hostile_producers.py::test_an_index_far_ahead_in_the_name_of_another_worker_costs_it_nothing",
        "service/test_tenancy.py::test_a_token_for_some_workers_lets_nobody_pass_as_another",
    ),
    "decoders are bounded before they start": (
        "hostile/test_expanding_payloads.py::test_no_reader_takes_memory_for_what_a_few_bytes_claim",
        "payload/test_refusals.py::test_a_truncated_payload_is_corrupt",
        "hostile/test_hostile_payloads.py::test_a_chunk_that_readers_cannot_read_is_quarantined_and_stays_so_over_a_restart",
        "hostile/test_hostile_learner.py::test_a_learner_trains_on_while_poison_of_every_kind_comes",
    ),
    "a line that is taken out or narrowed ends the calls that wait": (
        "hostile/test_revoked_tokens.py::test_a_call_that_waits_ends_when_its_token_is_taken_out",
        "hostile/test_revoked_tokens.py::test_a_call_that_waits_ends_when_its_buffer_is_not_its_tokens_any_more",
        "service/test_tokens.py::test_a_file_that_cannot_be_used_leaves_the_old_tokens_for_a_while_and_then_none",
    ),
    "a client makes no directory that a server names": (
        "hostile/test_hostile_server.py::test_a_directory_in_which_nobody_made_a_store_is_left_as_it_is",
        "hostile/test_hostile_server.py::test_a_payload_by_any_other_name_than_an_id_is_not_read",
        "hostile/test_hostile_server.py::test_a_link_in_a_store_is_not_followed",
        "hostile/test_hostile_server.py::test_a_url_that_could_mean_something_to_another_service_is_refused",
        "hostile/test_hostile_server.py::test_a_store_that_the_user_names_is_taken_whatever_the_server_says",
    ),
    "secrets come from files or the environment": (
        "client/test_secrets.py::test_a_server_told_a_password_as_an_argument_warns_and_does_not_repeat_it",
        "service/test_transport.py::test_the_local_socket_answers_beside_an_encrypted_port_to_its_owner_alone",
        "hostile/test_local_user.py::test_a_store_that_somebody_else_made_is_written_to_by_nobody",
        "hostile/test_local_user.py::test_a_journal_is_readable_by_its_owner_only",
    ),
    "sizes are checked before anything is allocated": (
        "offline/test_import_bounds.py::test_a_file_that_asks_for_more_than_it_may_is_refused",
        "offline/test_unpickling.py::test_calls_are_refused_and_not_made",
        "offline/test_unpickling.py::test_a_huge_declared_shape_allocates_nothing",
    ),
    "what others chose is printed as text": (
        "hostile/test_terminal.py::test_what_others_named_does_nothing_to_the_terminal",
    ),
    "URLs are shown without passwords": (
        "hostile/test_trusting_settings.py::test_a_password_with_signs_of_a_url_is_shown_nowhere",
        "service/test_authorization.py::test_a_refusal_says_why_and_shows_no_token",
    ),
    # Setting it up
    "**Encryption.** `breadbox serve --tls-cert": (
        "service/test_transport.py::test_an_encrypted_server_is_called_by_those_who_trust_its_authority",
    ),
    "`--tls-client-ca ca.pem` asks every client": (
        "service/test_transport.py::test_a_client_without_a_certificate_gets_no_answer_from_any_method",
    ),
    "Certificates that do not fit end": (
        "service/test_transport.py::test_a_certificate_that_does_not_fit_is_told_at_once_and_in_words",
    ),
    "A closed connection looks like": (
        "service/test_transport.py::test_a_client_in_the_clear_is_told_that_the_server_may_encrypt",
    ),
    "Files are read again when they change: a renewed": (
        "service/test_transport.py::test_a_renewed_certificate_is_shown_without_a_restart",
        "service/test_transport.py::test_renewed_files_that_cannot_be_used_leave_the_old_certificate",
    ),
    "**Tokens.** `breadbox token": (
        "service/test_tokens.py::test_the_command_makes_a_token_and_its_line",
    ),
    "of which `@FILE` stands for what the file holds": (
        "service/test_credentials.py::test_a_client_reads_its_token_from_a_file",
    ),
    "`breadbox secrets DIRECTORY` makes": (
        "service/test_credentials.py::test_what_is_there_stays_as_it_is",
        "deploy/test_composition_file.py::test_each_service_mounts_the_secrets_of_one_reader_and_can_change_none",
        "deploy/test_kubernetes.py::test_secrets_come_from_what_the_command_makes",
    ),
    "The file is read again within a second": (
        "service/test_tokens.py::test_a_running_server_takes_a_changed_file",
        "hostile/test_revoked_tokens.py::test_a_call_that_waits_ends_when_its_token_is_taken_out",
    ),
    "A file that was emptied": (
        "hostile/test_revoked_tokens.py::test_an_emptied_file_lets_nobody_in",
        "service/test_tokens.py::test_a_file_without_tokens_lets_nobody_in",
    ),
    "A token file or `--config` that others may write is not used": (
        "hostile/test_trusting_settings.py::test_who_could_write_a_servers_files_does_not_become_its_administrator",
        "hostile/test_trusting_settings.py::test_a_token_file_that_others_may_write_from_now_on_is_not_read_again",
    ),
    "A token is compared with every entry": (
        "service/test_tokens.py::test_every_entry_is_compared_whichever_matches",
    ),
    "| `producer` | AppendFragments": (
        "service/test_authorization.py::test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    "| `learner` | StartSession": (
        "service/test_authorization.py::test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    "| `admin` | everything": ("service/test_authorization.py::test_an_admin_may_call_everything",),
    "A line may bind its token further": (
        "service/test_tokens.py::test_a_line_says_what_bounds_the_token",
        "service/test_tenancy.py::test_a_star_stands_for_any_run_of_characters_and_nothing_else_for_another",
    ),
    "Reports of episodes may come as often": (
        "hostile/test_quotas.py::test_reports_of_one_token_are_slowed_down_to_its_rate_and_others_are_not",
    ),
    "--file tokens` writes such a line": (
        "service/test_tokens.py::test_the_command_adds_lines_to_a_file_that_a_server_reads",
    ),
    "Rollout workers that append under a token": (
        "service/test_tenancy.py::test_a_token_for_some_workers_lets_nobody_pass_as_another",
        "rollout/test_command.py::test_a_worker_whose_name_its_token_is_not_for_ends_before_it_starts",
    ),
    "A bound token, an administrator's too": (
        "service/test_tenancy.py::test_a_teams_admin_makes_buffers_that_are_the_teams",
        "service/test_tenancy.py::test_a_team_sees_its_own_buffers_only",
    ),
    "A call that names another is refused": (
        "service/test_tenancy.py::test_what_is_refused_does_not_tell_whether_there_is_such_a_buffer",
        "service/test_tenancy.py::test_a_lease_of_another_team_is_none_in_a_buffer_of_ones_own",
    ),
    "A certificate does not stand in for a token": (
        "service/test_transport.py::test_a_certificate_does_not_stand_in_for_a_token",
    ),
    "The user `default` may be turned off": (
        "service/test_credentials.py::"
        "test_a_default_user_as_whom_redis_cannot_read_its_file_is_a_concern",
        "integration/test_redis_users.py::"
        "test_nothing_acknowledged_is_lost_when_redis_and_server_are_stopped_and_started",
    ),
    "**The store.** Use `rediss://`": (
        "stores/test_acl.py::test_the_command_makes_users_with_the_documented_rights",
        "stores/test_acl.py::test_the_clients_user_may_do_nothing_else",
    ),
    "is what GetStoreConfig returns to clients": (
        "stores/test_acl.py::test_clients_write_and_read_and_the_server_confirms_and_deletes",
    ),
    "a server without `--client-store` does not start": (
        "hostile/test_trusting_settings.py::test_a_server_does_not_hand_its_own_password_to_tokens_unless_asked_by_name",
    ),
    "**The gateway.** With `--gateway`": (
        "integration/test_gateway.py::test_nobody_is_told_where_the_store_is",
    ),
    "A producer reads weights and what it has not announced": (
        "integration/test_gateway.py::test_a_producer_reads_weights_and_what_it_has_not_announced_and_nothing_else",
        "integration/test_gateway.py::test_a_learner_reads_payloads_of_its_own_buffers_only",
        "integration/test_gateway.py::test_nobody_discards_what_others_wrote_or_a_buffer_refers_to",
    ),
    "**Images** of others, and the base of ours": (
        "deploy/test_composition_file.py::test_every_image_of_others_and_every_base_can_be_pinned_by_its_digest",
    ),
    "the server warns of a password among its arguments": (
        "client/test_secrets.py::test_a_server_told_a_password_as_an_argument_warns_and_does_not_repeat_it",
    ),
}
"""A part of each line, and the tests that hold it."""


def lines() -> list[str]:
    """The lines of the page that claim something, which code and heads of tables do not."""
    text = (ROOT / "SECURITY.md").read_text()
    found = []
    for section in SECTIONS:
        body = re.split(r"^## ", text.split(f"## {section}\n", 1)[1], flags=re.MULTILINE)[0]
        body = re.sub(r"^```.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
        found += [
            line
            for line in body.splitlines()
            if line and not line.startswith(("| ---", "| attacker | what", "| role |"))
        ]
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests that stand in a file, in classes or not."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_line_of_the_page_is_held_by_a_test() -> None:
    introduction = ("Breadbox moves training data", "The assets are these data")

    assert [] == [
        line
        for line in lines()
        if not line.startswith(introduction) and not any(part in line for part in CLAIMS)
    ]


def test_nothing_is_held_that_the_page_does_not_say() -> None:
    text = "\n".join(lines())

    assert [] == [part for part in CLAIMS if part not in text]


@pytest.mark.parametrize("held_by", sorted({each for tests in CLAIMS.values() for each in tests}))
def test_the_tests_are_there(held_by: str) -> None:
    path, _, name = held_by.partition("::")

    assert name in names_in(ROOT / "tests" / path)
