"""A3: exits and fixed points. What each task is worth, and the laws that judge it."""

from tinyspec.grade import a3_calibration, a3_laws, a3_layers, a3_sweeps
from tinyspec.grade.task import Assignment, Task

ASSIGNMENT = Assignment(
    "A3",
    "Exits and fixed points",
    (
        Task("softmax_response", "A3.1 Confidence: the softmax response", 6, (a3_laws.is_the_gap,)),
        Task("saturation", "A3.2 Confidence: saturation", 8, (a3_laws.is_the_cosine, a3_laws.is_in_range)),
        Task(
            "exit_layer",
            "A3.3 The exit layer",
            14,
            (a3_laws.leaves_at_the_first, a3_laws.threshold_decays, a3_laws.threshold_is_cut),
        ),
        Task("decode", "A3.4 Missing keys and values: copy", 22, a3_layers.laws(recompute=False)),
        Task("decode_recomputing", "A3.5 Missing keys and values: recompute", 10, a3_layers.laws(recompute=True)),
        Task("p_value", "A3.6 A p-value", 8, (a3_calibration.is_valid, a3_calibration.is_the_tail)),
        Task(
            "calibrate",
            "A3.7 Learn then Test",
            12,
            (a3_calibration.controls_its_risk, a3_calibration.accepts_what_passed),
        ),
        Task("jacobi", "A3.8 Jacobi iteration", 20, a3_sweeps.LAWS),
    ),
)
