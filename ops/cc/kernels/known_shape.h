// The shape of an op's output where it is known from an attribute alone.
#ifndef SMP_TF_OPS_CC_KERNELS_KNOWN_SHAPE_H_
#define SMP_TF_OPS_CC_KERNELS_KNOWN_SHAPE_H_

#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace smp {

// Gives output 0 the shape that the attribute `shape` says.
inline absl::Status SetKnownShape(tensorflow::shape_inference::InferenceContext* context) {
  tensorflow::PartialTensorShape shape;
  TF_RETURN_IF_ERROR(context->GetAttr("shape", &shape));
  tensorflow::shape_inference::ShapeHandle handle;
  TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shape, &handle));
  context->set_output(0, handle);
  return absl::OkStatus();
}

}  // namespace smp

#endif  // SMP_TF_OPS_CC_KERNELS_KNOWN_SHAPE_H_
