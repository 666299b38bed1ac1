// Package unbroken strikes at decode workers while they answer: they are killed, stopped, cut off,
// drained, flipped and sent away, one strike after the other, while all kinds of requests are
// answered. Each answer must be as in a run that nothing disturbs, and after each strike nothing may
// be held. The workers are real processes, or run on virtual time: see Workers. Only tests import it.
package unbroken
