"""The campaigns by name, in the order in which they run."""

from attack.checkpoints import Checkpoints
from attack.documents import Documents
from attack.hostile import Hostile
from attack.images import Images
from attack.kills import Kills
from attack.soak import Soak
from attack.stage import Campaign

CAMPAIGNS: dict[str, Campaign] = {
    campaign.name: campaign for campaign in (Kills(), Images(), Checkpoints(), Documents(), Hostile(), Soak())
}
