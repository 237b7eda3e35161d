// SmpKeep, SmpWantKept, SmpTakeKept: hand tensors of a running step to the script, in the steps for
// which it asks.
//
//   script                      step
//   SmpWantKept(key, true)
//                               SmpKeep(key, microbatch 0)    holds its inputs
//                               SmpKeep(key, microbatch 1)    holds its inputs
//   SmpTakeKept(key, 0), ...                                  gives them to the script, and forgets
//   them SmpWantKept(key, false)
//                               SmpKeep(key, ...)             does nothing: a look at one number
//
// A tensor is held by reference, so nothing is copied, and a step that is not asked frees it as it
// did before.
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpKeep")
    .Input("values: T")
    .Attr("T: list(type) >= 1")
    .Attr("key: string")
    .Attr("microbatch: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Holds its inputs for the script, where that has asked for them by the key.");

REGISTER_OP("SmpWantKept")
    .Attr("key: string")
    .Attr("wanted: bool")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc(
        "Asks for the tensors of a key from now on, or no longer, and forgets those that are "
        "held.");

REGISTER_OP("SmpTakeKept")
    .Output("values: T")
    .Attr("T: list(type) >= 1")
    .Attr("key: string")
    .Attr("microbatch: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnknownShape)
    .Doc("Gives the tensors that are held for a key and a microbatch, and forgets them.");

// What a step has handed over: its tensors, and the device in whose memory they lie.
struct Held {
  std::string device;
  std::vector<tf::Tensor> tensors;
};

// All tensors that scripts have asked for in this process.
class Kept {
 public:
  static Kept& Get() {
    static Kept* kept = new Kept;  // Never freed: a step may still run while the process ends.
    return *kept;
  }

  bool IsAnyWanted() const { return number_wanted_.load(std::memory_order_relaxed) > 0; }

  void Want(const std::string& key, bool wanted) {
    std::map<std::pair<std::string, int64_t>, Held> forgotten;  // Freed after the lock is released.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted) {
      wanted_.insert(key);
    } else {
      wanted_.erase(key);
    }
    number_wanted_.store(static_cast<int>(wanted_.size()), std::memory_order_relaxed);
    for (auto held = held_.begin(); held != held_.end();) {
      auto next = std::next(held);
      if (held->first.first == key) forgotten.insert(held_.extract(held));
      held = next;
    }
  }

  void Put(const std::string& key, int64_t microbatch, Held held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_.count(key) > 0) std::swap(held_[{key, microbatch}], held);
  }

  absl::Status Take(const std::string& key, int64_t microbatch, const std::string& device,
                    std::vector<tf::Tensor>* tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto held = held_.find({key, microbatch});
    if (held == held_.end()) {
      return absl::NotFoundError("No tensors are held for '" + key + "', microbatch " +
                                 std::to_string(microbatch) +
                                 ": the step has not run since they were asked for.");
    }
    if (held->second.device != device) {
      return absl::FailedPreconditionError("The tensors of '" + key + "' lie on " +
                                           held->second.device + ", and were asked for on " +
                                           device + ".");
    }
    *tensors = std::move(held->second.tensors);
    held_.erase(held);
    return absl::OkStatus();
  }

 private:
  std::atomic<int> number_wanted_{0};
  std::mutex mutex_;
  std::set<std::string> wanted_;
  std::map<std::pair<std::string, int64_t>, Held> held_;
};

class SmpKeepOp : public tf::OpKernel {
 public:
  explicit SmpKeepOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("key", &key_));
    OP_REQUIRES_OK(context, context->GetAttr("microbatch", &microbatch_));
  }

  // So it runs at once where its inputs were made, and is no reason to wake another thread.
  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override {
    if (!Kept::Get().IsAnyWanted()) return;
    Held held{context->device()->name(), {}};
    for (int i = 0; i < context->num_inputs(); ++i) held.tensors.push_back(context->input(i));
    Kept::Get().Put(key_, microbatch_, std::move(held));
  }

 private:
  std::string key_;
  tf::int64 microbatch_ = 0;
};

class SmpWantKeptOp : public tf::OpKernel {
 public:
  explicit SmpWantKeptOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("key", &key_));
    OP_REQUIRES_OK(context, context->GetAttr("wanted", &wanted_));
  }

  void Compute(tf::OpKernelContext*) override { Kept::Get().Want(key_, wanted_); }

 private:
  std::string key_;
  bool wanted_ = false;
};

class SmpTakeKeptOp : public tf::OpKernel {
 public:
  explicit SmpTakeKeptOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("key", &key_));
    OP_REQUIRES_OK(context, context->GetAttr("microbatch", &microbatch_));
  }

  void Compute(tf::OpKernelContext* context) override {
    std::vector<tf::Tensor> tensors;
    OP_REQUIRES_OK(context,
                   Kept::Get().Take(key_, microbatch_, context->device()->name(), &tensors));
    OP_REQUIRES(context, static_cast<int>(tensors.size()) == context->num_outputs(),
                absl::InvalidArgumentError("Asked for " + std::to_string(context->num_outputs()) +
                                           " tensors of '" + key_ + "', of which " +
                                           std::to_string(tensors.size()) + " are held."));
    for (int i = 0; i < context->num_outputs(); ++i) {
      OP_REQUIRES(context, tensors[i].dtype() == context->expected_output_dtype(i),
                  absl::InvalidArgumentError("Tensor " + std::to_string(i) + " of '" + key_ +
                                             "' is of another type than was asked for."));
      context->set_output(i, tensors[i]);
    }
  }

 private:
  std::string key_;
  tf::int64 microbatch_ = 0;
};

// None of them looks into a tensor, so each runs where the tensors lie.
REGISTER_KERNEL_BUILDER(Name("SmpKeep").Device(tf::DEVICE_CPU), SmpKeepOp);
REGISTER_KERNEL_BUILDER(Name("SmpKeep").Device(tf::DEVICE_GPU), SmpKeepOp);
REGISTER_KERNEL_BUILDER(Name("SmpTakeKept").Device(tf::DEVICE_CPU), SmpTakeKeptOp);
REGISTER_KERNEL_BUILDER(Name("SmpTakeKept").Device(tf::DEVICE_GPU), SmpTakeKeptOp);
REGISTER_KERNEL_BUILDER(Name("SmpWantKept").Device(tf::DEVICE_CPU), SmpWantKeptOp);

}  // namespace
}  // namespace smp
