// Horovod 0.28.1 includes XLA's builder from where TensorFlow kept it in 2022. It has moved twice
// since.
#pragma once

#if __has_include("xla/hlo/builder/xla_builder.h")
#include "xla/hlo/builder/xla_builder.h"
#else
#include "xla/client/xla_builder.h"
#endif
