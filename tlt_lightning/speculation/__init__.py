"""Choose strategies of speculative decoding, plan CUDA graphs, look drafts up; no torch."""

from tlt_lightning.speculation.graph_plan import BucketedGraphPool, FullGraph, GraphPlan, GraphPool, arms_by_batch
from tlt_lightning.speculation.selectors.beg_mab import BEGMABSelector
from tlt_lightning.speculation.selectors.cost_model import CostModelSelector
from tlt_lightning.speculation.selectors.rules import FixedSelector, ThresholdSelector
from tlt_lightning.speculation.strategy import OFF, Drafter, MeasuredStep, SelectorState, Strategy, StrategySelector
from tlt_lightning.speculation.suffix_index import SuffixIndex
