"""Speculative decoding: strategies, who chooses them, which graphs they need, drafting by look-up; no torch."""

from tlt_lightning.speculation.base import OFF as OFF
from tlt_lightning.speculation.base import Drafter as Drafter
from tlt_lightning.speculation.base import MeasuredStep as MeasuredStep
from tlt_lightning.speculation.base import SelectorState as SelectorState
from tlt_lightning.speculation.base import Strategy as Strategy
from tlt_lightning.speculation.base import StrategySelector as StrategySelector
from tlt_lightning.speculation.beg_mab import BEGMABSelector as BEGMABSelector
from tlt_lightning.speculation.cost_model_selector import CostModelSelector as CostModelSelector
from tlt_lightning.speculation.fixed import FixedSelector as FixedSelector
from tlt_lightning.speculation.graph_plan import CaptureReport as CaptureReport
from tlt_lightning.speculation.graph_plan import FullGraph as FullGraph
from tlt_lightning.speculation.graph_plan import GraphCosts as GraphCosts
from tlt_lightning.speculation.graph_plan import GraphPlan as GraphPlan
from tlt_lightning.speculation.graph_pool import BucketedGraphPool as BucketedGraphPool
from tlt_lightning.speculation.graph_pool import FullGraphPool as FullGraphPool
from tlt_lightning.speculation.graph_pool import GraphPool as GraphPool
from tlt_lightning.speculation.graph_pool import arms_by_batch as arms_by_batch
from tlt_lightning.speculation.suffix_index import Proposal as Proposal
from tlt_lightning.speculation.suffix_index import SuffixIndex as SuffixIndex
from tlt_lightning.speculation.threshold import ThresholdSelector as ThresholdSelector
