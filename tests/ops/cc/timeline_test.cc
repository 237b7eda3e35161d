// The recorder: which steps it takes, what it keeps, and that several threads may note at once.
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/smp_timeline.h"

namespace {

smp_timeline_point TaskPoint(const char* task, bool is_end) {
  smp_timeline_point point{};
  point.event = SMP_EVENT_TASK;
  point.is_end = is_end ? 1 : 0;
  std::strncpy(point.task, task, SMP_TASK_BYTES - 1);
  return point;
}

void RunStep(uint64_t program, int64_t step) {
  smp_timeline_begin_step(program, step);
  const smp_timeline_point point = TaskPoint("0F0", false);
  smp_timeline_note(&point);
  smp_timeline_end_step(program, step);
}

std::vector<smp_timeline_point> Stop(uint64_t* dropped) {
  std::vector<smp_timeline_point> points(smp_timeline_stop(dropped));
  CHECK(smp_timeline_take(points.data(), points.size()) == points.size());
  return points;
}

void TestStepsInTheWindow() {
  uint64_t dropped = 0;
  RunStep(1, 4);  // before the start
  CHECK(smp_timeline_start(100, 1, 2) == 1);
  CHECK(smp_timeline_start(100, 0, -1) == 0);  // one at a time
  smp_timeline_count_program(1);
  for (int64_t step = 5; step < 10; ++step) {
    CHECK(smp_timeline_is_on() == (step == 7 || step == 8));
    RunStep(1, step);
    RunStep(2, step);  // does not count, but is between two that do
  }
  const std::vector<smp_timeline_point> points = Stop(&dropped);
  CHECK(dropped == 0);
  CHECK(smp_timeline_is_on() == 0);
  std::string seen;
  int64_t before = 0;
  for (const smp_timeline_point& point : points) {
    CHECK(point.time_ns >= before);
    before = point.time_ns;
    if (point.event == SMP_EVENT_TASK) continue;
    seen += std::to_string(point.program) + "." + std::to_string(point.step) +
            (point.is_end ? "] " : "[ ");
  }
  // The begin of the step after the last one is there, and no more of it.
  CHECK(seen == "1.6[ 1.6] 2.6[ 2.6] 1.7[ 1.7] 2.7[ 2.7] 1.8[ ");
  CHECK(smp_timeline_stop(&dropped) == 0);
}

void TestNoEnd() {
  uint64_t dropped = 0;
  CHECK(smp_timeline_start(100, 0, -1) == 1);
  RunStep(3, 0);  // not counted, and nothing has begun
  CHECK(smp_timeline_is_on() == 0);
  smp_timeline_count_program(3);
  RunStep(3, 1);
  RunStep(3, 2);
  CHECK(Stop(&dropped).size() == 6);
}

void TestWhatDoesNotFit() {
  uint64_t dropped = 0;
  CHECK(smp_timeline_start(4, 0, -1) == 1);
  smp_timeline_count_program(1);
  RunStep(1, 0);
  RunStep(1, 1);
  CHECK(Stop(&dropped).size() == 4);
  CHECK(dropped == 2);
}

void TestThreads() {
  uint64_t dropped = 0;
  CHECK(smp_timeline_start(100000, 0, -1) == 1);
  smp_timeline_count_program(1);
  smp_timeline_begin_step(1, 0);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) {
        const smp_timeline_point point = TaskPoint("1B7", i % 2 == 1);
        smp_timeline_note(&point);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<smp_timeline_point> points = Stop(&dropped);
  CHECK(points.size() == 4001);
  for (size_t i = 1; i < points.size(); ++i) CHECK(std::string(points[i].task) == "1B7");
}

}  // namespace

int main() {
  TestStepsInTheWindow();
  TestNoEnd();
  TestWhatDoesNotFit();
  TestThreads();
  std::puts("timeline_test: ok");
  return 0;
}
