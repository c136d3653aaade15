"""A3: exits and fixed points. Its tasks, the laws that judge them, and the points of each law."""

from tinyspec.grade import a3_calibration, a3_laws, a3_layers, a3_sweeps
from tinyspec.grade.task import Assignment, GradedLaw, Task
from tinyspec.laws.calibration_laws import CALIBRATED, SEQUENCE, SUPER

ASSIGNMENT = Assignment(
    "A3",
    "Exits and fixed points",
    (
        Task(
            "softmax_response",
            "A3.1 Confidence: the softmax response",
            (GradedLaw(6, a3_laws.GAP, a3_laws.is_the_gap),),
        ),
        Task(
            "saturation",
            "A3.2 Confidence: saturation",
            (
                GradedLaw(5, a3_laws.COSINE, a3_laws.is_the_cosine),
                GradedLaw(3, a3_laws.RANGE, a3_laws.is_in_range, needs=(a3_laws.COSINE,)),
            ),
        ),
        Task(
            "exit_layer",
            "A3.3 The exit layer",
            (
                GradedLaw(4, a3_laws.FIRST, a3_laws.leaves_at_the_first),
                GradedLaw(6, a3_laws.DECAY, a3_laws.threshold_decays),
                GradedLaw(4, a3_laws.CUT, a3_laws.threshold_is_cut),
            ),
        ),
        Task(
            "decode",
            "A3.4 Missing keys and values: copy",
            a3_layers.laws(recompute=False, points=(3, 2, 6, 2, 3, 4, 2)),
            uses=("softmax_response",),
        ),
        Task(
            "decode_recomputing",
            "A3.5 Missing keys and values: recompute",
            a3_layers.laws(recompute=True, points=(1, 1, 3, 1, 1, 1, 2)),
            uses=("softmax_response",),
        ),
        Task(
            "p_value",
            "A3.6 A p-value",
            (
                GradedLaw(3, SUPER, a3_calibration.is_valid),
                GradedLaw(5, a3_calibration.TAIL, a3_calibration.is_the_tail),
            ),
        ),
        Task(
            "calibrate",
            "A3.7 Learn then Test",
            (
                GradedLaw(5, CALIBRATED, a3_calibration.controls_its_risk),
                GradedLaw(7, SEQUENCE, a3_calibration.accepts_what_passed),
            ),
        ),
        Task("jacobi", "A3.8 Jacobi iteration", a3_sweeps.LAWS),
    ),
)
