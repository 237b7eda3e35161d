#include "transport/activity.h"

#include <algorithm>
#include <cstdio>

namespace smp {
namespace {

double Elapsed(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

std::string Seconds(std::chrono::steady_clock::time_point since) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", Elapsed(since));
  return text;
}

}  // namespace

void Activity::BeginStep(uint64_t program, int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  Program& begun = programs_[program];
  begun.begun = step;
  begun.inside = true;
  averages_ += begun.averages;
  collectives_.clear();
  program_ = program;
  step_ = step;
  inside_ = true;
  since_ = Clock::now();
  changed_.notify_all();
}

void Activity::EndStep(uint64_t program) {
  std::lock_guard<std::mutex> lock(mutex_);
  programs_[program].inside = false;
  inside_ = false;
  since_ = Clock::now();
  changed_.notify_all();
}

bool Activity::AwaitStep(uint64_t program, int64_t step, bool ended, double timeout_s) const {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s));
  std::unique_lock<std::mutex> lock(mutex_);
  const auto reached = [&] {
    const auto found = programs_.find(program);
    if (found == programs_.end()) return false;
    const Program& at = found->second;
    return at.begun > step || (at.begun == step && !(ended && at.inside));
  };
  changed_.wait_until(lock, deadline, [&] { return !awaited_ || reached(); });
  return reached();
}

void Activity::StopAwaiting() {
  std::lock_guard<std::mutex> lock(mutex_);
  awaited_ = false;
  changed_.notify_all();
}

void Activity::Set(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  text_ = text;
  text_since_ = Clock::now();
}

void Activity::SetAverages(uint64_t program) {
  std::lock_guard<std::mutex> lock(mutex_);
  programs_[program].averages = true;
}

int64_t Activity::averages() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return averages_;
}

void Activity::BeginCollective(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  // The graph that it stood in has failed: nothing said that this rank is through.
  const auto left = FindCollective(name);
  if (left != collectives_.end()) collectives_.erase(left);
  collectives_.push_back({name, Clock::now()});
}

void Activity::EndCollective(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = FindCollective(name);
  if (found != collectives_.end()) collectives_.erase(found);
}

std::vector<Activity::Collective>::iterator Activity::FindCollective(const std::string& name) {
  return std::find_if(collectives_.begin(), collectives_.end(),
                      [&](const Collective& each) { return each.name == name; });
}

int64_t Activity::step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return step_;
}

std::string Activity::StepInWords() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step_ < 0) return "before the first step";
  return (inside_ ? "in step " : "after step ") + std::to_string(step_);
}

std::string Activity::InWords() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string words;
  if (step_ < 0) {
    words = "has begun no step yet, " + Seconds(since_) + " after its start";
  } else if (inside_) {
    words = "has been in step " + std::to_string(step_) + " for " + Seconds(since_);
  } else {
    words = "ended step " + std::to_string(step_) + " " + Seconds(since_) + " ago";
  }
  if (!text_.empty()) words += ", doing '" + text_ + "' for " + Seconds(text_since_);
  return words;
}

std::map<uint64_t, Activity::Program> Activity::Programs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return programs_;
}

Activity::Moment Activity::Now() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Moment now{inside_, program_, step_, Elapsed(since_), text_, Elapsed(text_since_), {}, 0};
  for (const Collective& each : collectives_) now.collectives.push_back(each.name);
  if (!collectives_.empty()) now.collective_seconds = Elapsed(collectives_.front().since);
  return now;
}

}  // namespace smp
