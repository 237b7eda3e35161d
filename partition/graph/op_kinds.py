"""Op types by what they cost: the tables that `node_cost` reads."""

from __future__ import annotations

from smp_tf.partition.graph.op_graph import SOURCES


def named(names: str) -> frozenset[str]:
    """Returns the op types that a text lists."""
    return frozenset(names.split())


#: Products and convolutions. Most models spend most of their time in them.
MATRIX_OPS = named(
    """
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum SparseMatMul SparseTensorDenseMatMul
    Conv2D Conv2DBackpropInput Conv2DBackpropFilter Conv3D Conv3DBackpropInputV2
    Conv3DBackpropFilterV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput
    DepthwiseConv2dNativeBackpropFilter CudnnRNN CudnnRNNV2 CudnnRNNV3
    """
)

#: Ops that call functions of the library: loops, calls, and choices between several functions.
LOOP_OPS = named("While StatelessWhile")
CALL_OPS = named("PartitionedCall StatefulPartitionedCall")
FUNCTION_OPS = LOOP_OPS | CALL_OPS | named("If StatelessIf Case StatelessCase")

#: Ops that draw random numbers.
RANDOM_OPS = named(
    """
    RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomShuffle RandomGamma RandomPoisson
    RandomPoissonV2 ParameterizedTruncatedNormal Multinomial StatelessRandomUniform StatelessRandomUniformV2
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal
    StatelessTruncatedNormalV2 StatelessMultinomial
    """
)

#: Ops that only rename, or say something about, a tensor: no data moves.
FREE_OPS = SOURCES | named(
    """
    Const Identity IdentityN NoOp Reshape Shape ShapeN Size Rank Squeeze ExpandDims StopGradient
    PreventGradient Placeholder PlaceholderWithDefault ReadVariableOp VariableShape VarHandleOp
    BroadcastGradientArgs EmptyTensorList TensorListReserve TensorListElementShape TensorListLength
    TensorListSetItem TensorListPushBack TensorListPopBack ConcatOffset Bitcast Assert Print PrintV2
    StringFormat CheckNumerics ControlTrigger OptionalFromValue OptionalNone OptionalHasValue
    OptionalGetValue Range
    """
)

#: Ops whose outputs are other names for the memory of their inputs: output 0 for input 0, and so on.
SAME_MEMORY_OPS = named(
    """
    Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Bitcast CheckNumerics
    """
)

#: Ops whose output lies in memory that exists anyway: that of a variable, or of the graph itself.
NO_MEMORY_OPS = named("Const ReadVariableOp")

#: Ops that copy data and compute nothing.
MOVING_OPS = named(
    """
    Gather GatherV2 GatherNd ResourceGather ResourceGatherNd Concat ConcatV2 Slice StridedSlice
    StridedSliceGrad Transpose ConjugateTranspose Pad PadV2 MirrorPad MirrorPadGrad Tile OneHot Pack
    Unpack Split SplitV Cast Fill ZerosLike OnesLike BroadcastTo Reverse ReverseV2 ReverseSequence
    ScatterNd TensorScatterUpdate DynamicStitch DynamicPartition SpaceToBatchND BatchToSpaceND
    SpaceToDepth DepthToSpace InvertPermutation Where Unique TensorListStack TensorListFromTensor
    TensorListGetItem TensorListConcatV2 TensorListGather ResizeNearestNeighbor
    ResizeNearestNeighborGrad AssignVariableOp MatrixDiagV3 MatrixDiagPartV3 MatrixSetDiagV3
    MatrixBandPart Roll DeepCopy ParallelDynamicStitch
    """
)

#: The op that stands for the sum of a tensor over the replicas. It runs once for each microbatch, since others wait for
#: its part.
SUM_OVER_REPLICAS = "SmpSumOverReplicas"

#: Operations per element of the output.
PER_OUTPUT = {
    name: flops
    for flops, names in {
        1: """
            Add AddV2 Sub Mul Div RealDiv DivNoNan Maximum Minimum Neg Abs Sign Square Relu Relu6
            ReluGrad Relu6Grad LeakyRelu LeakyReluGrad BiasAdd BiasAddV1 Select SelectV2 Equal
            NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot Floor Ceil
            Round Rint FloorDiv FloorMod Mod TruncateDiv ClipByValue SquaredDifference Reciprocal
            Inv AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterUpdate
            ResourceScatterSub TensorScatterAdd IsFinite IsNan IsInf BitwiseAnd BitwiseOr BitwiseXor
            LeftShift RightShift MulNoNan Real Imag Conj SmpSumOverReplicas
            """,
        4: """
            Sqrt Rsqrt SqrtGrad RsqrtGrad ReciprocalGrad InvGrad TanhGrad SigmoidGrad EluGrad
            SeluGrad SoftplusGrad SoftsignGrad Softsign ResizeBilinear ResizeBilinearGrad
            """,
        10: """
            Exp Expm1 Log Log1p Tanh Sigmoid Erf Erfc Erfinv Pow Sin Cos Tan Atan Atan2 Asin Acos
            Sinh Cosh Elu Selu Softplus Lgamma Digamma Xlogy Xdivy Softmax LogSoftmax
            SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
            """,
        20: """
            RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt
            StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal
            StatelessRandomNormalV2 StatelessTruncatedNormal StatelessTruncatedNormalV2
            StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2
            StatelessRandomUniformFullInt StatelessRandomUniformInt Multinomial StatelessMultinomial
            StatelessRandomGetKeyCounter StatelessRandomGetAlg StatelessRandomGetKeyCounterAlg
            """,
    }.items()
    for name in names.split()
}

#: Ops that write their output into the memory of an input of the same size, if nobody else reads that input.
IN_PLACE_OPS = named(
    """
    Add AddV2 AddN Sub Mul Div RealDiv DivNoNan MulNoNan Maximum Minimum Neg Abs Sign Square Relu Relu6 ReluGrad
    Relu6Grad LeakyRelu LeakyReluGrad BiasAdd BiasAddV1 Floor Ceil Round Rint FloorDiv FloorMod Mod TruncateDiv
    SquaredDifference Reciprocal Inv Sqrt Rsqrt SqrtGrad RsqrtGrad ReciprocalGrad InvGrad TanhGrad SigmoidGrad EluGrad
    SeluGrad SoftplusGrad SoftsignGrad Softsign Exp Expm1 Log Log1p Tanh Sigmoid Erf Erfc Erfinv Pow Sin Cos Tan Atan
    Atan2 Asin Acos Sinh Cosh Elu Selu Softplus Lgamma Digamma Xlogy Xdivy Softmax LogSoftmax Select SelectV2
    ClipByValue LogicalAnd LogicalOr LogicalNot FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
    """
)

#: Operations per element of the first input.
PER_INPUT = {
    name: flops
    for flops, names in {
        1: """
            Sum Mean Max Min Prod All Any EuclideanNorm ArgMax ArgMin BiasAddGrad L2Loss Cumsum
            Cumprod UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMean SegmentSum
            SegmentSumV2 SegmentMean SparseSegmentSum SparseSegmentMean InTopK InTopKV2 TopK TopKV2
            Bincount DenseBincount
            """,
        8: """
            FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3
            """,
        12: """
            FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
            """,
    }.items()
    for name in names.split()
}

#: Ops that look at a window around each element of the output.
POOLING_OPS = named(
    """
    MaxPool AvgPool MaxPool3D AvgPool3D MaxPoolV2 MaxPoolWithArgmax
    """
)

#: Gradients of these ops. They look at a window around each element of the last input.
POOLING_GRADIENTS = named(
    """
    MaxPoolGrad AvgPoolGrad MaxPool3DGrad AvgPool3DGrad MaxPoolGradWithArgmax
    """
)

#: Ops whose work grows with the third power of a matrix's side.
FACTORISATIONS = named(
    """
    Cholesky MatrixInverse MatrixSolve MatrixTriangularSolve Qr Svd SelfAdjointEigV2
    """
)
