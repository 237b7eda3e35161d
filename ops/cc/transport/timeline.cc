// The recorder behind smp_timeline.h. One lock guards it all; it is taken only while recording, and
// when steps begin while that is armed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "transport/smp_timeline.h"

namespace {

struct Recorder {
  // Read without the lock: whether notes are taken, and whether steps are counted.
  std::atomic<bool> on{false};
  std::atomic<bool> armed{false};

  std::mutex mutex;
  std::vector<smp_timeline_point> points;
  size_t capacity = 0;
  uint64_t dropped = 0;
  int64_t first = 0;
  int64_t last = -1;
  int64_t begun = 0;  // counted steps since the start
  std::set<uint64_t> counted;
};

Recorder& TheRecorder() {
  static auto* recorder = new Recorder;  // outlives all threads
  return *recorder;
}

void Add(Recorder& recorder, const smp_timeline_point& point) {
  if (recorder.points.size() >= recorder.capacity) {
    ++recorder.dropped;
  } else {
    recorder.points.push_back(point);
  }
}

}  // namespace

int64_t smp_timeline_clock(void) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int smp_timeline_start(size_t capacity, int64_t first, int64_t last) {
  Recorder& recorder = TheRecorder();
  std::lock_guard<std::mutex> lock(recorder.mutex);
  if (recorder.armed) return 0;
  recorder.points.clear();
  // At once, so that no note has to wait for memory.
  recorder.points.reserve(capacity);
  recorder.capacity = capacity;
  recorder.dropped = 0;
  recorder.first = first;
  recorder.last = last;
  recorder.begun = 0;
  recorder.counted.clear();
  recorder.armed = true;
  return 1;
}

void smp_timeline_count_program(uint64_t program) {
  Recorder& recorder = TheRecorder();
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.counted.insert(program);
}

int smp_timeline_is_on(void) { return TheRecorder().on.load(std::memory_order_relaxed) ? 1 : 0; }

void smp_timeline_note(const smp_timeline_point* point) {
  Recorder& recorder = TheRecorder();
  if (!recorder.on.load(std::memory_order_relaxed)) return;
  smp_timeline_point noted = *point;
  // Before the lock, which another thread may hold.
  if (noted.time_ns == 0) noted.time_ns = smp_timeline_clock();
  std::lock_guard<std::mutex> lock(recorder.mutex);
  if (recorder.on) Add(recorder, noted);
}

void smp_timeline_begin_step(uint64_t program, int64_t step) {
  Recorder& recorder = TheRecorder();
  if (!recorder.armed.load(std::memory_order_relaxed)) return;
  smp_timeline_point point{};
  point.time_ns = smp_timeline_clock();
  point.program = program;
  point.step = step;
  point.event = SMP_EVENT_STEP;
  std::lock_guard<std::mutex> lock(recorder.mutex);
  if (!recorder.armed) return;
  const bool was_on = recorder.on;
  if (recorder.counted.count(program) > 0) {
    const int64_t number = recorder.begun++;
    recorder.on = number >= recorder.first && (recorder.last < 0 || number <= recorder.last);
  }
  // The begin of the step after the last one is the end of what follows that.
  if (was_on || recorder.on) Add(recorder, point);
}

void smp_timeline_end_step(uint64_t program, int64_t step) {
  smp_timeline_point point{};
  point.program = program;
  point.step = step;
  point.event = SMP_EVENT_STEP;
  point.is_end = 1;
  smp_timeline_note(&point);
}

size_t smp_timeline_stop(uint64_t* dropped) {
  Recorder& recorder = TheRecorder();
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.armed = false;
  recorder.on = false;
  *dropped = recorder.dropped;
  return recorder.points.size();
}

size_t smp_timeline_take(smp_timeline_point* out, size_t count) {
  Recorder& recorder = TheRecorder();
  std::lock_guard<std::mutex> lock(recorder.mutex);
  const size_t copied = std::min(count, recorder.points.size());
  if (copied > 0) std::memcpy(out, recorder.points.data(), copied * sizeof(smp_timeline_point));
  std::vector<smp_timeline_point>().swap(recorder.points);
  return copied;
}
