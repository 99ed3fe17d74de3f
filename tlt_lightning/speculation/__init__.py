"""Choose strategies of speculative decoding, plan CUDA graphs, look drafts up; no torch."""

from tlt_lightning.speculation.graph_plan import BucketedGraphPool as BucketedGraphPool
from tlt_lightning.speculation.graph_plan import FullGraph as FullGraph
from tlt_lightning.speculation.graph_plan import GraphPlan as GraphPlan
from tlt_lightning.speculation.graph_plan import GraphPool as GraphPool
from tlt_lightning.speculation.graph_plan import arms_by_batch as arms_by_batch
from tlt_lightning.speculation.selectors.beg_mab import BEGMABSelector as BEGMABSelector
from tlt_lightning.speculation.selectors.cost_model import CostModelSelector as CostModelSelector
from tlt_lightning.speculation.selectors.rules import FixedSelector as FixedSelector
from tlt_lightning.speculation.selectors.rules import ThresholdSelector as ThresholdSelector
from tlt_lightning.speculation.strategy import OFF as OFF
from tlt_lightning.speculation.strategy import Drafter as Drafter
from tlt_lightning.speculation.strategy import MeasuredStep as MeasuredStep
from tlt_lightning.speculation.strategy import SelectorState as SelectorState
from tlt_lightning.speculation.strategy import Strategy as Strategy
from tlt_lightning.speculation.strategy import StrategySelector as StrategySelector
from tlt_lightning.speculation.suffix_index import SuffixIndex as SuffixIndex
