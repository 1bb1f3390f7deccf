// The tests: what each rank does, and what must come of it.
#pragma once
#include "world.h"

bool random_case(const Options& options, World& world, int rank);
bool killed(const Options& options, World& world, int rank);
bool killed_while_watched(const Options& options, World& world, int rank);
bool silent(const Options& options, World& world, int rank);
bool wrong_secret(const Options& options, World& world, int rank);
bool absent(const Options& options, World& world, int rank);
bool misuse(const Options& options, World& world, int rank);
bool again(const Options& options, World& world, int rank);
bool left(const Options& options, World& world, int rank);
bool strangers(const Options& options, World& world, int rank);
bool full_door(const Options& options, World& world, int rank);
bool no_descriptors(const Options& options, World& world, int rank, bool for_ever);
bool no_descriptor_for_window(const Options& options, World& world, int rank);
bool proofs(const Options& options, World& world, int rank);
bool short_secret(const Options& options, World& world, int rank);
bool crowded(const Options& options, World& world, int rank);
bool half_registered(const Options& options, World& world, int rank);
bool late_signal(const Options& options, World& world, int rank, const std::string& where);
bool liar(const Options& options, World& world, int rank, const std::string& lie);
