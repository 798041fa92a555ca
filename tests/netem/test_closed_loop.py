"""The loop closed: from the link's sockets by the detector and the router to where the next prompt is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas_net.congestion.verdict import LinkState
from tools.netlab import Link
from tools.netlab.closed_loop import Experiment, play_arm, write_closed_loop_model
from tools.netlab.closed_loop_report import report

# Long prompts alone, so that every one says something of the link; one is under way when the competitor comes.
SHORT = Experiment(
    requests_per_s=0.9, long_share=1.0, home_tokens_per_s=120.0, warm_s=8.0, event_s=8.0, after_s=7.5, seed=2
)
TROUBLE = (LinkState.BUILDING, LinkState.CONGESTED)


@pytest.mark.netem
@pytest.mark.timeout(120)
def test_requests_move_home_while_others_have_the_link_and_back_when_they_are_gone(
    netlab_link: Link, tmp_path: Path
) -> None:
    """Before what waits for the link is worth more than its deadline; nobody is failed for it."""
    netlab_link.reset(ab=SHORT.link(), ba=SHORT.link())
    played = play_arm("detector", SHORT, netlab_link, write_closed_loop_model(tmp_path / "model"))
    came_s, left_s = played.event
    before = [one for one in played.served if one.at_s < came_s]
    during = [one for one in played.served if came_s <= one.at_s < left_s]
    after = [one for one in played.served if one.at_s >= left_s]
    assert not report([played])["arms"]["detector"]["failed"]
    # The competitor was really there, and seen.
    assert played.competitor_bps > 0.25 * SHORT.competitor_bps
    assert any(v.state in TROUBLE and came_s <= v.at_s - played.start_s < left_s for v in played.verdicts)
    assert any(one.offloaded for one in before)
    home = [one.at_s for one in during if not one.offloaded]
    assert home
    worth = [played.drain_s(v) for v in played.verdicts if v.at_s - played.start_s <= home[0]]
    assert max(worth) < SHORT.deadline_s
    assert any(one.offloaded for one in after)

    shares = [sum(one.offloaded for one in phase) / len(phase) for phase in (before, during, after)]
    assert shares[1] < min(shares[0], shares[2]), shares
