//! Batch sizes and batches in flight against each other.

use crate::{
    KEYS, contenders, cores,
    load::{Crowd, drive},
    ms, on,
    server::Flavour,
    support::median,
};

const BATCHES: [usize; 5] = [16, 32, 64, 128, 256];
const IN_FLIGHT: [usize; 4] = [1, 2, 3, 4];
const ROUNDS: usize = 5;

pub(crate) async fn measure(flavour: Flavour) {
    let server = cores::start(flavour);
    let mut contenders = Vec::new();
    for in_flight in IN_FLIGHT {
        for batch in BATCHES {
            let store = contenders::store(&server.url()).batch(batch).in_flight(in_flight);
            let store = store.build().unwrap();
            store.check().await.unwrap();
            contenders.push(contenders::tollgate(store, &contenders::ample(1)));
        }
    }
    for callers in [16, 64, 256, 1_024] {
        let crowd = Crowd { callers, keys: KEYS };
        let mut rounds = vec![Vec::new(); contenders.len()];
        // The first round only warms up.
        for round in 0..=ROUNDS {
            for (contender, rounds) in contenders.iter().zip(&mut rounds) {
                let seen = drive(contender, crowd, round, ms(150)).await;
                if round > 0 {
                    rounds.push(seen);
                }
            }
        }
        println!(
            "\n{}: thousands of decisions a second (p99 in ms)",
            on(flavour, &format!("{callers} callers"))
        );
        print!("{:>10}", "in flight");
        BATCHES.iter().for_each(|batch| print!("{:>16}", format!("batch {batch}")));
        for (in_flight, rounds) in IN_FLIGHT.iter().zip(rounds.chunks(BATCHES.len())) {
            print!("\n{in_flight:>10}");
            for rounds in rounds {
                let of = |figure: fn(&crate::load::Seen) -> f64| {
                    median(rounds.iter().map(figure).collect())
                };
                let thousands = of(|seen| seen.per_second) / 1_000.0;
                let p99_ms = of(|seen| seen.latencies[1]) / 1_000.0;
                print!("{:>16}", format!("{thousands:.1} ({p99_ms:.1})"));
            }
        }
        println!();
    }
}
